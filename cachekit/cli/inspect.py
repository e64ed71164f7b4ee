"""`cachekit inspect`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from cachekit.cli.app import UserError, app
from cachekit.run.loading import quieten


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

    quieten()
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
