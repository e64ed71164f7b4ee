"""The arithmetic of `benchmarks.overhead`; no test asserts a time."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import overhead
from benchmarks.figures import Figure, figure, interleaved
from benchmarks.models import flux, no_op_flux, pipeline, sample
from cachekit import FirstBlockCacheConfig, TaylorSeerCacheConfig

TINY = overhead.Size(tokens=2, layers=1, single_layers=2, heads=1, steps=8, rounds=1)


def test_a_figure_is_the_median_with_its_range() -> None:
    item = figure("group", "name", [3.0, 1.0, 9.0], "ms", 2.5)
    assert (item.value, item.low, item.high) == (3.0, 1.0, 9.0)
    assert not item.passes
    assert figure("group", "name", [3.0], "", 3.0).passes
    assert figure("group", "name", [3.0], "", 2.5, at_most=False).passes
    assert not figure("group", "name", [2.0], "", 2.5, at_most=False).passes
    assert figure("group", "name", [3.0], "").passes


def test_variants_take_turns_after_a_warm_up() -> None:
    pipe = pipeline(flux(1, 2, heads=1))
    seen = []

    def loop() -> None:
        seen.append(pipe.transformer._compiled_call_impl is not None)
        sample(pipe, 4, 2)

    plain, cached = interleaved(pipe, loop, (None, TaylorSeerCacheConfig(cache_interval=2)), 2, "wall")
    assert seen == [False, True] * 3
    assert [(item.calls, item.computed, item.own_seconds) for item in plain] == [(0, 0, 0.0)] * 2
    assert [(item.calls, item.computed) for item in cached] == [(4, 3)] * 2


def test_a_delta_is_what_the_block_lists_return() -> None:
    model = flux(1, 2, heads=1)
    tokens = 2 * 2 + 32
    assert overhead.delta_bytes(model, partial(sample, pipeline(model), 1, 2)) == 2 * tokens * 64 * 4
    assert not any(module._forward_hooks for module in model.modules())


def test_shares_of_a_call_are_parts_of_a_whole() -> None:
    model = flux(1, 2, heads=1)
    ticks = iter(range(10**6))
    probe, outside = overhead.shares(model, partial(sample, pipeline(model), 3, 2), lambda: float(next(ticks)))
    # By a clock that ticks at every look, a block lasts one tick and a call seven.
    assert probe == pytest.approx(1 / 7)
    assert outside == pytest.approx(4 / 7)


def test_held_state_is_in_its_budget() -> None:
    figures = {item.name: item for item in overhead.held_state(TINY)}
    assert figures["MagCache"].value == pytest.approx(1.0)
    assert figures["TaylorSeer, order 1"].value == pytest.approx(2.0)
    assert figures["TaylorSeer, order 2"].value == pytest.approx(3.0)
    assert all(item.passes for item in figures.values())


def test_blocks_that_do_nothing_keep_the_structure() -> None:
    model = no_op_flux(2, 3)
    assert (len(model.transformer_blocks), len(model.single_transformer_blocks)) == (2, 3)
    pipe = pipeline(model)
    bare = sample(pipe, 3, 2)
    _, (timing,) = interleaved(pipe, lambda: sample(pipe, 3, 2), (None, FirstBlockCacheConfig(threshold=0.0)), 1, "cpu")
    assert (timing.calls, timing.computed) == (3, 3)
    assert torch.equal(bare, sample(pipe, 3, 2))


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--check"], 1)])
def test_the_exit_code_tells_only_when_asked(
    options: list[str], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overhead, "measure", lambda size: [Figure("group", "name", 2.0, 1.0, 3.0, "%", 1.0)])
    monkeypatch.setattr("sys.argv", ["overhead", "--json", str(tmp_path / "o.json"), "--quick", *options])
    assert overhead.main() == code
    assert "fail" in capsys.readouterr().out
    document = json.loads((tmp_path / "o.json").read_text())
    assert document["figures"][0]["passes"] is False
