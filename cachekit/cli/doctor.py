"""`cachekit doctor`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cachekit.cli.app import app
from cachekit.run.loading import quieten

_SOMETHING_IS_WRONG = 1


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the check that draws.")] = False,
) -> None:
    """Versions, devices, optional parts and checks, to paste in a bug report. Exit code 1 if a check fails."""
    from cachekit.doctor import examine, render

    quieten()
    report = examine(draw=not quick)
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else render(report))
    if not report.healthy:
        raise typer.Exit(_SOMETHING_IS_WRONG)
