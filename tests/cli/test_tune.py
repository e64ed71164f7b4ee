"""`cachekit tune`: a setting, or a recommendation, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .support import invoke, refused, use_tiny_pipeline

GUIDED = ("--arg", "true_cfg_scale=3.0", "--arg", "negative_prompt=")


def test_a_setting_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_tiny_pipeline(monkeypatch)
    out = tmp_path / "tuned.json"
    result = invoke(
        *("tune", "emoji-flux", "--strategy", "taylorseer", "--speedup", "1.5", "--steps", "6", "--pictures", "2"),
        *("--evaluations", "4", "--out", str(out), "--field", "max_order=0", *GUIDED),
    )
    assert result.exit_code == 0, result.output
    assert "* TaylorSeerCacheConfig(" in result.stdout
    assert "max_order=0" in result.stdout
    assert f"written: {out}" in result.stdout
    saved = json.loads(out.read_text())
    assert saved["strategy"] == "taylorseer"
    assert 1 <= len(saved["curve"]) <= 4
    assert saved["about"]["uncached_calls"] == 12, "the guidance was passed on"


def test_all_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_tiny_pipeline(monkeypatch)
    out = tmp_path / "found.json"
    result = invoke(
        *("tune", "emoji-flux", "--recommend", "--speedup", "1.3", "--steps", "4", "--pictures", "1"),
        *("--evaluations", "1", "--out", str(out)),
    )
    assert result.exit_code == 0, result.output
    assert "worth it" in result.stdout
    assert json.loads(out.read_text())["format"] == "cachekit.recommendation"


def test_a_profile_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_tiny_pipeline(monkeypatch)
    profile = tmp_path / "profile.safetensors"
    made = invoke(
        *("calibrate", "emoji-flux", "--out", str(profile), "--steps", "5", "--budgets", "2"),
        *("--evaluations", "0", "--held-back", "0.4"),
    )
    assert made.exit_code == 0, made.output
    result = invoke("tune", "emoji-flux", "--strategy", "schedule", "--profile", str(profile), "--speedup", "2")
    assert result.exit_code == 0, result.output
    assert "computed_steps=2" in result.stdout


def test_bad_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_tiny_pipeline(monkeypatch)
    assert "exactly one" in refused("tune", "emoji-flux", "--speedup", "2", "--min-psnr", "30")
    assert "unknown strategy" in refused("tune", "emoji-flux", "--strategy", "nothing")
    assert "no file at" in refused("tune", "emoji-flux", "--profile", str(tmp_path / "p.safetensors"))
    assert "does not exist" in refused("tune", "emoji-flux", "--out", str(tmp_path / "no" / "t.json"))
    assert "name=value" in refused("tune", "emoji-flux", "--arg", "guidance")
    assert "--field belongs" in refused("tune", "emoji-flux", "--recommend", "--field", "max_order=0")
    assert "one of work" in refused("tune", "emoji-flux", "--by", "luck")
    assert "neither an embedded pipeline" in refused("tune", "nothing", "--prompts", str(_some(tmp_path)))


def test_what_cannot_be_reached_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_pipeline(monkeypatch)
    result = invoke(
        *("tune", "emoji-flux", "--strategy", "taylorseer", "--speedup", "40", "--steps", "4", "--pictures", "1"),
    )
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("cachekit: no setting of taylorseer reaches speed-up 40x")
    assert "cache_interval" in result.stdout, "the curve is shown nevertheless"


def _some(folder: Path) -> Path:
    path = folder / "some.txt"
    path.write_text("fox\n")
    return path
