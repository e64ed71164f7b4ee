"""`cachekit run`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from cachekit.cli.app import UserError, app
from cachekit.cli.common import chosen_device, is_ours, named_value, prompt_lines

_DIED = 1
_STEPS = 28


class RayAddressMayBeLeftOut(TyperCommand):
    """`--ray` takes the next word only if it is an address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the address that stands for none."""
        return super().parse_args(ctx, with_address(args))


def with_address(args: list[str]) -> list[str]:
    """The arguments with an empty address after a `--ray` that has none."""
    found: list[str] = []
    for place, word in enumerate(args):
        found.append(word)
        following = args[place + 1] if place + 1 < len(args) else ""
        if word == "--ray" and not re.fullmatch(r"auto|local|(ray://)?[\w.\[\]:-]+:\d+", following):
            found.append("")
    return found


@app.command(cls=RayAddressMayBeLeftOut)
def run(
    out: Annotated[Path, typer.Option(help="Folder for the pictures; made if it is not there.")],
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[PROMPTS.txt]...", help="Text files with one prompt per line.")
    ] = None,
    pipeline: Annotated[
        str, typer.Option(help="An embedded pipeline, or the folder of a diffusers pipeline.")
    ] = "emoji-flux",
    prompt: Annotated[list[str] | None, typer.Option(help="What to draw; repeat it.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Denoising steps; 28, or those of the profile, if left out.")
    ] = None,
    guidance: Annotated[float | None, typer.Option(help="Strength of the guidance.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the noise.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Pictures of each prompt, with this seed and the next ones.")] = 1,
    cache: Annotated[str | None, typer.Option(help="A strategy, such as first_block; none if left out.")] = None,
    field: Annotated[
        list[str] | None, typer.Option("--set", help="A field of the cache's config, as name=value; repeat it.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Calibrated profile; --speedup or --min-psnr chooses from it.")
    ] = None,
    speedup: Annotated[float | None, typer.Option(help="Denoiser calls uncached / computed.")] = None,
    min_psnr: Annotated[float | None, typer.Option(help="dB that 95 % of the pictures keep to the uncached.")] = None,
    arg: Annotated[
        list[str] | None, typer.Option(help="What else the pipeline is called with, as name=value (JSON); repeat it.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, auto, cuda, cuda:N or mps.")] = "cpu",
    devices: Annotated[
        str | None, typer.Option(help="Several, one process each, such as cuda:2,cuda:0; cuda for all cards.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="So many processes on the CPU, or actors with --ray.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Spread over a Ray cluster: host:port or ray://host:port, `local` to start one here; without an "
            "address the one that RAY_ADDRESS or `ray start` tell of.",
        ),
    ] = None,
) -> None:
    """Draw prompts into a folder. What is there already, drawn with the same settings, is not drawn again."""
    from cachekit.demo.output import prepare
    from cachekit.run import Job, ProcessDiedError, RunError, Settings, pictures

    texts = [text.strip() for text in prompt or () if text.strip()]
    texts += [line for file in files or () for line in prompt_lines(file)]
    if not texts:
        raise UserError('nothing to draw; give --prompt "red heart" or a text file with one prompt per line')
    try:
        settings = Settings(
            pipeline=pipeline,
            steps=steps or _usual_steps(profile),
            guidance=guidance,
            arguments=dict(named_value(text, "--arg") for text in arg or ()),
            cache=cache,
            fields=dict(named_value(text, "--set") for text in field or ()),
            profile=None if profile is None else str(profile),
            speedup=speedup,
            min_psnr=min_psnr,
        )
        _check(settings)
        if seed + count > 2**32:
            raise UserError(f"--seed {seed} with --count {count} goes beyond the largest seed, {2**32 - 1}")
        draw = _places(device, devices, processes) if ray is None else _cluster(ray, device, devices, processes)
        job = Job(settings, tuple(pictures(settings, texts, range(seed, seed + count))), prepare(out))
        missing = job.missing()
        log = Console(stderr=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                _with_bar(missing, draw, log)
            finally:
                for text in dict.fromkeys(str(item.message) for item in caught if is_ours(item.category)):
                    log.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)
    except RunError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror or error}") from None
    except ProcessDiedError as error:
        kept = f"{len(job.pictures) - len(job.missing().pictures)} of {len(job.pictures)} pictures are in {out}"
        log.print(f"cachekit: {error}; {kept}; run it again to draw the rest", markup=False, soft_wrap=True)
        raise typer.Exit(_DIED) from None
    console = Console()
    console.print(_summary(job, missing), markup=False, highlight=False, soft_wrap=True)


def _places(device: str, devices: str | None, processes: int | None) -> Callable[[Any, Any], None]:
    """How the pictures are drawn: here, or in several processes."""
    import torch

    from cachekit.run.devices import device_set
    from cachekit.run.job import draw_here
    from cachekit.run.launch import draw_on

    if devices is not None and processes is not None:
        raise UserError("--devices says how many processes there are; leave --processes out")
    if devices is None and processes in (None, 1):
        place = chosen_device(device)
        return lambda job, advance: draw_here(job, place, advance)
    if processes is not None and device.strip().lower() != "cpu":
        raise UserError("--processes is for the CPU; name the cards with --devices, such as cuda:0,cuda:1")
    chosen = ("cpu",) * (processes or 0) if devices is None else device_set(devices, torch.cuda.device_count())
    if len(chosen) == 1:
        return lambda job, advance: draw_here(job, chosen[0], advance)
    return lambda job, advance: draw_on(job, chosen, advance)


def _cluster(address: str, device: str, devices: str | None, actors: int | None) -> Callable[[Any, Any], None]:
    """The pictures are drawn by actors of a Ray cluster, whose devices are not those of this machine."""
    from cachekit.run.on_ray import draw_on_ray

    kind = device.strip().lower()
    if devices is not None:
        raise UserError("--devices names cards of this machine; with --ray say --device cuda, and how many --processes")
    if kind not in ("cpu", "cuda"):
        raise UserError(f"with --ray the device is cpu or cuda, one card for each actor; got {device!r}")
    return lambda job, advance: draw_on_ray(job, address or None, kind, actors, advance)


def _usual_steps(profile: Path | None) -> int:
    import cachekit as ck

    if profile is None:
        return _STEPS
    try:
        return ck.Profile.load(profile).num_inference_steps
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from None


def _check(settings: Any) -> None:
    """Refuse what can be refused before anything is loaded."""
    if settings.profile is None and (settings.speedup is not None or settings.min_psnr is not None):
        raise UserError("--speedup and --min-psnr choose from a profile; name it with --profile FILE")
    if settings.profile is not None and (settings.speedup is None) == (settings.min_psnr is None):
        raise UserError("say what the profile is asked for: either --speedup 2 or --min-psnr 40")
    if settings.profile is not None and settings.cache not in (None, "schedule"):
        raise UserError(f"--profile makes a schedule; leave --cache {settings.cache} out")
    if settings.fields and settings.cache is None and settings.profile is None:
        raise UserError("--set belongs to a cache; name it with --cache")
    settings.config()


def _with_bar(job: Any, draw: Callable[[Any, Any], None], log: Console) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=log, transient=True, disable=not log.is_terminal) as progress:
        task = progress.add_task("starting", total=len(job.pictures))
        draw(job, lambda text, drawn: progress.update(task, description=text[:40], advance=drawn))


def _summary(job: Any, missing: Any) -> str:
    """How many pictures were drawn, and what that took."""
    drawn, there = len(missing.pictures), len(job.pictures) - len(missing.pictures)
    work = missing.work()
    calls = sum(each.get("calls", 0) for each in work)
    computed = sum(each.get("computed", 0) for each in work)
    cached = f"; {computed} of {calls} denoiser calls computed" if calls else ""
    already = f", {there} there already" if there else ""
    return f"written: {job.folder} ({drawn} drawn{already}{cached})"
