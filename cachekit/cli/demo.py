"""`cachekit demo`."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cachekit.cli.app import UserError, app
from cachekit.cli.common import chosen_device, is_ours, load_embedded


@app.command()
def demo(
    prompts: Annotated[
        list[str] | None, typer.Option("--prompts", help="What to draw; repeat the option or separate by commas.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 28,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the noise of the first picture.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, auto, cuda, cuda:N or mps.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for grid.png and results.json.")] = Path("cachekit-demo"),
    model: Annotated[str, typer.Option(help="Embedded pipeline to draw with.")] = "emoji-flux",
    every: Annotated[bool, typer.Option("--all", help="Every strategy, not only the first three.")] = False,
) -> None:
    """Draw with an embedded pipeline, uncached and cached, and compare time and fidelity."""
    from cachekit import demo as parts
    from cachekit import zoo
    from cachekit.demo.output import prepare
    from cachekit.files import write_atomically

    place = chosen_device(device)
    if model not in zoo.names():
        raise UserError(f"unknown model {model!r}; embedded pipelines: {', '.join(zoo.names())}")
    known = zoo.prompts(model)
    texts = _split(prompts) if prompts is not None else parts.spread(known, 6)
    try:
        prepare(out)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror or error}") from None
    console, log = Console(), Console(stderr=True)
    pipe = load_embedded(model, place)
    run = parts.demo(pipe, texts, known, steps, seed, every=every)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = _with_bar(run, log)
    settings = {"model": model, "prompts": texts, "steps": steps, "seed": seed, "device": place, "all": every}
    picture = io.BytesIO()
    parts.draw_grid(results).save(picture, format="PNG")
    document = json.dumps(parts.to_dict(results, run.not_applicable, **settings), indent=2, allow_nan=False)
    try:
        grid = write_atomically(out / "grid.png", picture.getvalue())
        figures = write_atomically(out / "results.json", f"{document}\n".encode())
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror or error}") from None
    console.print(parts.render(results))
    for line in parts.remarks(results, run.not_applicable):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for text in dict.fromkeys(str(item.message) for item in caught if is_ours(item.category)):
        log.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)
    for path in (grid, figures):
        console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)


def _split(prompts: list[str]) -> list[str]:
    texts = [text.strip() for item in prompts for text in item.split(",")]
    texts = list(dict.fromkeys(text for text in texts if text))
    if not texts:
        raise UserError("--prompts is empty; name at least one thing to draw")
    return texts


def _with_bar(run: Any, log: Console) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=log, transient=True) as progress:
        task = progress.add_task("starting", total=run.pictures)
        return run.run(
            lambda text, drawn: progress.update(task, description=text[:40], advance=drawn, total=run.pictures)
        )
