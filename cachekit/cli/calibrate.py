"""`cachekit calibrate`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cachekit.cli.app import UserError, app
from cachekit.cli.common import chosen_device, load_any, named_value, prompt_lines, training_prompts


@app.command()
def calibrate(
    pipeline: Annotated[str, typer.Argument(help="An embedded pipeline, or the folder of a diffusers pipeline.")],
    out: Annotated[Path, typer.Option(help="The profile to write; an interrupted calibration goes on from it.")],
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text file with one prompt per line; an embedded pipeline has prompts of its own."),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Denoising steps.")] = 28,
    budgets: Annotated[str, typer.Option(help="Numbers of computed steps, such as 7,9,12; empty for all.")] = "",
    held_back: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of the prompts to judge by.")] = 0.25,
    evaluations: Annotated[int, typer.Option(min=0, help="Further schedules that are run per budget.")] = 4,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the noise and of the search.")] = 0,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Prompts of one pipeline call, which bounds the memory; all by default.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, auto, cuda, cuda:N or mps.")] = "cpu",
    arg: Annotated[
        list[str] | None, typer.Option(help="What the pipeline is called with, as name=value (JSON); repeat it.")
    ] = None,
) -> None:
    """Find schedules of computed steps for every speed, and save them as a profile."""
    from cachekit import CacheWarning
    from cachekit.calibration import calibrate as run

    place = chosen_device(device)
    texts = prompt_lines(prompts) if prompts is not None else training_prompts(pipeline, 48)
    counts, arguments = _numbers(budgets), dict(named_value(text) for text in arg or ())
    if not out.parent.is_dir():
        raise UserError(f"cannot write to {out}: the folder {out.parent} does not exist")
    pipe = load_any(pipeline, place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        try:
            profile = run(
                pipe,
                texts,
                steps,
                budgets=counts or None,
                held_back=held_back,
                evaluations=evaluations,
                seed=seed,
                batch_size=batch_size,
                resume=out,
                **arguments,
            )
            path = profile.save(out)
        except (ValueError, TypeError, OSError) as error:
            raise UserError(str(error)) from None
    console = Console()
    console.print(str(profile), markup=False, highlight=False, soft_wrap=True)
    console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"--budgets takes whole numbers such as 7,9,12, got {text!r}") from None
