"""Runs the command line in this process; a tiny Flux pipeline stands in for the embedded one where none is needed."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from cachekit import zoo
from cachekit.cli import app
from tests.pipelines.families import flux

KNOWN = ["red heart", "fox", "rocket", "lion", "frog"]


def invoke(*arguments: str) -> Any:
    """Exit code, stdout and stderr of `cachekit ARGUMENTS`."""
    return CliRunner().invoke(app, list(arguments))


def refused(*arguments: str) -> str:
    """The one line with which `cachekit ARGUMENTS` is refused; asserts exit code 2 and an empty stdout."""
    result = invoke(*arguments)
    lines = result.stderr.splitlines()
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("cachekit: ")
    return str(lines[0])


def use_tiny_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """`zoo.load` gives a tiny Flux with random weights, 16 x 16 pixels."""
    tiny = flux.family()[0]

    def load(name: str, device: str | None = None) -> Any:
        assert (name, device) == ("emoji-flux", "cpu")
        pipe = tiny.build()
        pipe.default_sample_size = 8
        return pipe

    monkeypatch.setattr(zoo, "load", load)
    monkeypatch.setattr(zoo, "prompts", lambda name: list(KNOWN))
