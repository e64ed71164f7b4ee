"""`cachekit calibrate`: a profile from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

import cachekit as ck

from .support import invoke, refused, use_tiny_pipeline


def test_a_profile_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_tiny_pipeline(monkeypatch)
    out = tmp_path / "profile.safetensors"
    result = invoke(
        *("calibrate", "emoji-flux", "--out", str(out), "--steps", "6", "--budgets", "2,4"),
        *("--evaluations", "0", "--arg", "true_cfg_scale=3.0", "--arg", "negative_prompt=", "--held-back", "0.4"),
    )
    assert result.exit_code == 0, result.output
    assert f"written: {out}" in result.stdout
    profile = ck.Profile.load(out)
    assert [len(point.computed_steps) for point in profile.front] == [2, 4]
    assert set(profile.magnitudes) == {"cond", "uncond"}, "the guidance was passed on"


def test_prompts_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_tiny_pipeline(monkeypatch)
    prompts, out = tmp_path / "prompts.txt", tmp_path / "profile.safetensors"
    prompts.write_text("fox\n\nlion\n", encoding="utf-8")
    result = invoke(
        *("calibrate", "emoji-flux", "--out", str(out), "--steps", "4", "--budgets", "2"),
        *("--prompts", str(prompts), "--evaluations", "0", "--held-back", "0", "--batch-size", "1"),
    )
    assert result.exit_code == 0, result.output
    assert ck.Profile.load(out).samples == 2


def test_bad_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_tiny_pipeline(monkeypatch)
    out, empty = str(tmp_path / "p.safetensors"), tmp_path / "empty.txt"
    empty.write_text("\n")
    some = tmp_path / "some.txt"
    some.write_text("fox\n")
    assert "neither an embedded pipeline" in refused("calibrate", "nothing", "--out", out, "--prompts", str(some))
    assert "holds no prompt" in refused("calibrate", "emoji-flux", "--out", out, "--prompts", str(empty))
    assert "--prompts FILE" in refused("calibrate", str(tmp_path), "--out", out)
    assert "whole numbers" in refused("calibrate", "emoji-flux", "--out", out, "--budgets", "two")
    assert "name=value" in refused("calibrate", "emoji-flux", "--out", out, "--arg", "guidance")
    assert "does not exist" in refused("calibrate", "emoji-flux", "--out", str(tmp_path / "no" / "p.safetensors"))
    assert "from 1 to 4" in refused("calibrate", "emoji-flux", "--out", out, "--steps", "4", "--budgets", "9")
    assert "unexpected keyword" in refused("calibrate", "emoji-flux", "--out", out, "--steps", "4", "--arg", "wrong=1")
