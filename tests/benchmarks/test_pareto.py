"""The arithmetic of `benchmarks.pareto` and that it goes on where it was stopped; no test asserts a time."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import samples as sampling
from benchmarks.comparison import Point, against_peers, at_speed, better_than_fewer_steps, bootstrap, points, table
from benchmarks.methods import Method
from benchmarks.pareto import Part
from benchmarks.samples import Prompt, Sample, measure, read, too_slow, write

ONE = Sample("cachekit schedule", "7 computed", False, "cat", 0, 1.0, 4.0, 4.0, 40.0, 0.99)


def test_a_curve_is_read_between_its_settings() -> None:
    curve = [Point("f", "a", False, 2.0, 50.0, 45.0), Point("f", "b", False, 4.0, 40.0, 30.0)]
    assert at_speed(curve, 3.0, "mean") == pytest.approx(45.0)
    assert at_speed(curve, 1.0, "mean") == 50.0, "a setting serves slower demands too"
    assert np.isnan(at_speed(curve, 4.5, "mean"))
    better = Point("f", "c", False, 4.1, 60.0, 50.0)
    assert at_speed([*curve, better], 2.0, "mean") == 60.0, "faster and better takes the place of both"


def test_points_take_medians_means_and_percentiles() -> None:
    group = [replace(ONE, seed=seed, speedup=speed, psnr=40.0 + seed) for seed, speed in enumerate((3.0, 4.0, 50.0))]
    (point,) = points(group)
    assert (point.speedup, point.mean, point.low) == (4.0, 41.0, pytest.approx(40.1))
    low, high = bootstrap([1.0, 2.0, 3.0], np.mean)
    assert 1.0 <= low < 2.0 < high <= 3.0


def test_the_best_peer_and_fewer_steps_at_the_same_speed() -> None:
    fewer = replace(ONE, family="fewer steps", setting="7 steps", psnr=39.0)
    worse = replace(ONE, family="peer a", setting="x", peer=True, psnr=20.0)
    slow = replace(ONE, family="peer b", setting="x", peer=True, speedup=3.0, psnr=35.0)
    found = [ONE, fewer, worse, slow]
    row = against_peers(found)
    assert (row["4x"]["best peer by mean"], row["4x"]["mean of the best peer"]) == ("peer a", 20.0)
    assert (row["3x"]["best peer by mean"], row["3x"]["mean"]) == ("peer b", 40.0)
    assert row["6x"]["mean"] is None
    assert row["6x"]["best peer by low"] is None
    assert better_than_fewer_steps(found) == {"7 computed against 7 steps": 1}
    assert "| peer b | 35.0 (35.0) | 35.0 (35.0) | - | - |" in table(found)


def test_a_rerun_draws_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, int]] = []

    def draw(pipe: Any, prompt: Prompt, seed: int, steps: int) -> tuple[torch.Tensor, float]:
        drawn.append((prompt.text, steps))
        return torch.full((3, 16, 16), steps / 32), steps / 28

    monkeypatch.setattr(sampling, "draw", draw)
    methods = [Method("fewer steps", "14 steps", 14), Method("fewer steps", "20 steps", 20)]
    prompts = [Prompt("cat", {}), Prompt("dog", {})]

    def run(**options: Any) -> None:
        write(
            measure({"cachekit": None}, methods, prompts, [0], 28, read(tmp_path), **options),
            tmp_path / "samples.jsonl",
        )

    run()
    whole = read(tmp_path)
    assert [(s.prompt, s.setting, s.speedup) for s in whole[:2]] == [("cat", "14 steps", 2.0), ("cat", "20 steps", 1.4)]
    assert (len(whole), len(drawn)) == (4, 6), "one uncached picture for each prompt"
    lines = (tmp_path / "samples.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    drawn.clear()
    run()
    assert drawn == [("dog", 28), ("dog", 20)], "the line that was cut off, and its baseline"
    assert [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()] == [
        json.loads(line) for line in lines
    ]
    drawn.clear()
    run()
    assert drawn == []


def test_slow_settings_and_failing_methods_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "draw", lambda pipe, prompt, seed, steps: (torch.zeros(3, 16, 16), float(steps)))

    def fail(pipe: Any) -> Any:
        raise RuntimeError("not on this model")

    methods = [Method("slow", "27", 27), Method("fast", "7", 7), Method("broken", "-", 28, fail)]
    methods.append(Method("uncached again", "noise floor", 28, nullcontext))
    found = list(measure({"cachekit": None}, methods, [Prompt("cat", {})], range(4), 28, (), too_slow(1.4, 2)))
    counts = {family: sum(s.family == family for s in found) for family in ("slow", "fast", "broken", "uncached again")}
    assert counts == {"slow": 2, "fast": 4, "broken": 0, "uncached again": 4}


def test_parts() -> None:
    assert Part.parse("2/3") == Part(2, 3)
    for text in ("0/2", "3/2", "x", "1"):
        with pytest.raises(argparse.ArgumentTypeError, match="such as 1/2"):
            Part.parse(text)
