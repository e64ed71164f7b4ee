"""The `cachekit` command itself: bad input gives one line on stderr and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

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


def _complain(message: str) -> int:
    line = " ".join(message.split())
    Console(stderr=True).print(f"cachekit: {line}", markup=False, highlight=False, soft_wrap=True)
    return BAD_INPUT
