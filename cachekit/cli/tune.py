"""`cachekit tune`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cachekit.cli.app import UserError, app
from cachekit.cli.common import chosen_device, is_ours, load_any, named_value, prompt_lines, training_prompts


@app.command()
def tune(
    pipeline: Annotated[str, typer.Argument(help="An embedded pipeline, or the folder of a diffusers pipeline.")],
    strategy: Annotated[str, typer.Option(help="What to tune.")] = "first_block",
    recommend: Annotated[
        bool, typer.Option("--recommend", help="Compare all strategies and fewer steps instead of tuning one.")
    ] = False,
    speedup: Annotated[float | None, typer.Option(help="How much faster; 2 unless --min-psnr is given.")] = None,
    min_psnr: Annotated[float | None, typer.Option(help="dB to uncached that 95 % of the pictures reach.")] = None,
    by: Annotated[str, typer.Option(help="What a speed-up is measured by: work, calls or time.")] = "work",
    profile: Annotated[
        Path | None,
        typer.Option(help="From `cachekit calibrate`: its schedules and magnitude ratios are used."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text file with one prompt per line; an embedded pipeline has prompts of its own."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Denoising steps; the profile's, or 28.")] = None,
    pictures: Annotated[int, typer.Option(min=1, help="At most so many prompts are drawn with a setting.")] = 8,
    held_back: Annotated[
        float, typer.Option(min=0.01, max=0.9, help="Share of the prompts to judge by (with --recommend).")
    ] = 0.5,
    evaluations: Annotated[int, typer.Option(min=1, help="At most so many settings are tried (for a strategy).")] = 12,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the noise.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, auto, cuda, cuda:N or mps.")] = "cpu",
    arg: Annotated[
        list[str] | None, typer.Option(help="What the pipeline is called with, as name=value (JSON); repeat it.")
    ] = None,
    field: Annotated[
        list[str] | None, typer.Option(help="A field of the config that stays as it is, as name=value; repeat it.")
    ] = None,
) -> None:
    """Find the setting of a cache for a speed or a quality, or the best cache for it."""
    import cachekit as ck

    place = chosen_device(device)
    texts = prompt_lines(prompts) if prompts is not None else training_prompts(pipeline, 48)
    arguments, fields = dict(map(named_value, arg or ())), dict(map(named_value, field or ()))
    if out is not None and not out.parent.is_dir():
        raise UserError(f"cannot write to {out}: the folder {out.parent} does not exist")
    if recommend and fields:
        raise UserError("--field belongs to one strategy; leave it out with --recommend")
    settings: dict[str, Any] = {
        "speedup": 2.0 if speedup is None and min_psnr is None else speedup,
        "min_psnr": min_psnr,
        "by": by,
        "num_inference_steps": steps,
        "pictures": pictures,
        "evaluations": evaluations,
        "seed": seed,
    }
    log = Console(stderr=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            given: tuple[Any, Any] = (texts, None) if profile is None else (ck.Profile.load(profile), texts)
            pipe = load_any(pipeline, place)
            call: Any = ck.recommend if recommend else ck.tune
            settings |= {"held_back": held_back} if recommend else {"strategy": strategy, "fields": fields}
            result = call(pipe, *given, **settings, **arguments)
            path = None if out is None else result.save(out)
        except (ValueError, TypeError, OSError, ck.CacheKitError) as error:
            raise UserError(str(error)) from None
    for text in dict.fromkeys(str(item.message) for item in caught if is_ours(item.category)):
        log.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)
    console = Console()
    console.print(_table(result))
    for line in result.remarks():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if path is not None:
        console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)
    if result.best is None and not recommend:
        raise UserError(result.missed)


def _table(result: Any) -> Table:
    from cachekit.calibration.rows import TITLES

    table = Table(box=box.SIMPLE_HEAD, padding=0, caption=result.caption, caption_justify="left")
    for place, title in enumerate(TITLES):
        table.add_column(title, justify="left" if place < 2 else "right", no_wrap=place != 1, overflow="fold")
    for row in result.rows():
        table.add_row(*map(escape, row))
    return table
