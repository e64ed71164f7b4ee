"""`cachekit doctor`: what it says of a healthy installation, and that it notices what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import cachekit
from cachekit.doctor import checks, examine, packages, render
from cachekit.doctor.packages import Package, Part

from .support import invoke


def test_a_block_to_paste() -> None:
    result = invoke("doctor", "--quick")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("```text", "```")
    assert re.search(rf"^cachekit +{re.escape(cachekit.__version__)}$", result.stdout, re.MULTILINE)
    assert re.search(rf"^  torch +{re.escape(torch.__version__)}$", result.stdout, re.MULTILINE)
    assert re.search(r"^devices\n  cpu: \d+ cores", result.stdout, re.MULTILINE)
    assert "  ok  weights of emoji-flux" in result.stdout
    assert "FAILED" not in result.stdout
    assert str(Path.home()) not in result.stdout


def test_the_same_as_json() -> None:
    result = invoke("doctor", "--quick", "--json")
    found = json.loads(result.stdout)
    assert found["healthy"] is True
    assert {"torch", "diffusers", "typer"} <= {package["name"] for package in found["packages"]}
    assert all({"brings", "install", "version"} <= set(part) for part in found["parts"])


@pytest.mark.slow
def test_the_check_that_draws_passes() -> None:
    check = checks.drawing()
    assert check.passed, check.detail
    assert check.detail.startswith("3 of 6 calls skipped")


def test_the_check_that_draws_notices_a_cache_without_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    class Still:
        """A pipeline without a denoiser call: nothing can be skipped."""

        def set_progress_bar_config(self, **_: Any) -> None: ...

    monkeypatch.setattr(checks, "load", lambda name: Still())
    check = checks.drawing()
    assert not check.passed
    assert "Still" in check.detail


def test_problems_give_exit_code_1_and_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version_of", lambda name: {"torch": "2.0.1", "rich": None}.get(name, "999"))
    monkeypatch.setattr(checks, "damage", lambda name: ["vae/x.safetensors has changed"])
    result = invoke("doctor", "--quick")
    assert result.exit_code == 1
    assert "torch 2.0.1 does not fit >=2.4: pip install 'torch>=2.4'" in result.stdout
    assert "rich is missing: pip install 'rich>=13.7'" in result.stdout
    assert "FAILED  weights of emoji-flux" in result.stdout
    assert "vae/x.safetensors has changed; install cachekit again" in result.stdout


def test_the_optional_is_named_with_what_it_would_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachekit.doctor.report.PARTS", (Part("no-such-package", "wonders", "[all]"),))
    text = render(examine(draw=False))
    assert "no-such-package  wonders: pip install 'no-such-package[all]'" in text


@pytest.mark.parametrize(
    ("version", "fits"), [("2.4", True), ("2.13.0+cpu", True), ("2.14.0.dev20260101", True), ("2.3.1", False)]
)
def test_versions_are_compared_as_versions(version: str, fits: bool) -> None:
    assert (Package("torch", version, ">=2.4").problem == "") is fits
