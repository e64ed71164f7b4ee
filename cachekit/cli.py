"""The command line: `cachekit demo`, `cachekit inspect`. Bad input gives one line on stderr and exit code 2."""

from __future__ import annotations

import io
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

BAD_INPUT = 2


class UserError(Exception):
    """Input that cannot be used; the message says why in one line."""


class OneLineErrors(TyperGroup):
    """Prints what is wrong with the input in one line and exits with code 2."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line; see :class:`OneLineErrors`."""
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except UserError as error:
            code = _complain(str(error))
        except typer.Abort:
            code = 130
        except Exception as error:
            # typer carries its own copy of click or uses the real one, by version: known by what it offers.
            message = getattr(error, "format_message", None)
            if message is None:
                raise
            code = _complain(f"{message().rstrip('.')}; see cachekit --help")
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    cls=OneLineErrors,
    help="Caches for diffusers pipelines: reuse work between denoising steps, with figures.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the `cachekit` command."""
    app()


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
) -> None:
    """Draw with an embedded pipeline, uncached and cached, and compare time and fidelity."""
    from cachekit import demo as parts
    from cachekit import zoo
    from cachekit.demo.output import prepare, write

    place = _device(device)
    if model not in zoo.names():
        raise UserError(f"unknown model {model!r}; embedded pipelines: {', '.join(zoo.names())}")
    known = zoo.prompts(model)
    texts = _split(prompts) if prompts is not None else parts.spread(known, 6)
    try:
        prepare(out)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror or error}") from None
    console, log = Console(), Console(stderr=True)
    pipe = _load(model, place)
    run = parts.demo(pipe, texts, known, steps, seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = _with_bar(run, log)
    settings = {"model": model, "prompts": texts, "steps": steps, "seed": seed, "device": place}
    picture = io.BytesIO()
    parts.draw_grid(results).save(picture, format="PNG")
    document = json.dumps(parts.to_dict(results, **settings), indent=2, allow_nan=False)
    grid = write(out / "grid.png", picture.getvalue())
    figures = write(out / "results.json", f"{document}\n".encode())
    console.print(parts.render(results))
    for text in dict.fromkeys(str(item.message) for item in caught if _is_ours(item.category)):
        log.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)
    for path in (grid, figures):
        console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def inspect(
    target: Annotated[
        str, typer.Argument(help="An embedded pipeline, a local folder, or a denoiser class of diffusers.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what discovery finds in a model, and which strategies can attach to it."""
    from cachekit.inspection import inspect_target
    from cachekit.inspection_text import render

    _quieten()
    try:
        found = inspect_target(target)
    except ValueError as error:
        raise UserError(str(error)) from None
    console = Console()
    if as_json:
        console.print_json(data=[item.to_dict() for item in found])
        return
    for item in found:
        console.print(render(item))


def _complain(message: str) -> int:
    line = " ".join(message.split())
    Console(stderr=True).print(f"cachekit: {line}", markup=False, highlight=False, soft_wrap=True)
    return BAD_INPUT


def _split(prompts: list[str]) -> list[str]:
    texts = [text.strip() for item in prompts for text in item.split(",")]
    texts = list(dict.fromkeys(text for text in texts if text))
    if not texts:
        raise UserError("--prompts is empty; name at least one thing to draw")
    return texts


def _device(name: str) -> str:
    """A device that torch has, from one of the accepted names."""
    import torch

    wanted, number = name.strip().lower(), name.strip().lower().removeprefix("cuda:")
    cards = torch.cuda.device_count()
    if wanted == "auto":
        return "cuda" if cards else "mps" if torch.backends.mps.is_available() else "cpu"
    if wanted == "cpu" or (wanted == "mps" and torch.backends.mps.is_available()) or (wanted == "cuda" and cards):
        return wanted
    if number.isdecimal() and wanted != number and int(number) < cards:
        return wanted
    if wanted in ("mps", "cuda") or (number.isdecimal() and wanted != number):
        raise UserError(f"device {name!r} is not available here: torch sees {cards} CUDA devices; use cpu or auto")
    raise UserError(f"unknown device {name!r}; accepted: cpu, auto, cuda, cuda:N, mps")


def _load(model: str, device: str) -> Any:
    from cachekit import zoo

    _quieten()
    try:
        pipe = zoo.load(model, device=device)
    except OSError as error:
        raise UserError(f"the files of {model} cannot be read: {error}") from None
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _quieten() -> None:
    """Log lines of other libraries would tear the progress bar and the tables apart."""
    import diffusers
    import transformers

    for logging in (diffusers.logging, transformers.logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()


def _with_bar(run: Any, log: Console) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=log, transient=True) as progress:
        task = progress.add_task("starting", total=run.pictures)
        return run.run(lambda text, drawn: progress.update(task, description=text[:40], advance=drawn))


def _is_ours(category: type[Warning]) -> bool:
    from cachekit import CacheWarning

    return issubclass(category, CacheWarning)
