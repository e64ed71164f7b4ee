"""Gates, guards and ratio curves as pure functions."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cachekit.engine.clock import View
from cachekit.engine.history import Entry, History
from cachekit.engine.rules import CAP_REASON, GateContext, Guards, Verdict
from cachekit.strategies.gates import DriftGate, IntervalGate, MagnitudeGate, resample_ratios


def context(
    step: int, computed: tuple[int, ...] = (), steps: int | None = 10, branch: str = "cond", **signals: Any
) -> GateContext:
    """A context after the computed steps (oldest first); `before` and `now` are the probe's residuals."""
    history = History(max(len(computed), 1))
    for entry in computed:
        history.push(Entry(entry, signal=signals.get("before")))
    return GateContext(View(0, step, steps, "scheduler"), branch, history, signals.get("now"), float)


def test_drift() -> None:
    before, now = torch.full((2, 3), 2.0), torch.full((2, 3), 2.5)
    verdict = DriftGate(0.3).decide(context(3, (2,), before=before, now=now))
    assert verdict.reuse
    assert verdict.score == pytest.approx(0.25)
    assert not DriftGate(0.25).decide(context(3, (2,), before=before, now=now)).reuse, "reuse only below"
    assert not DriftGate(0.0).decide(context(3, (2,), before=before, now=before)).reuse


def test_drift_is_relative_to_the_last_computed_step() -> None:
    small, large = torch.ones(4), torch.full((4,), 100.0)
    for size in (small, large):
        assert DriftGate(1.0).decide(context(1, (0,), before=size, now=1.5 * size)).score == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("before", "now"),
    [(None, torch.ones(2)), (torch.ones(2), None), (torch.ones(2), torch.ones(3))],
    ids=["no old", "no new", "other shape"],
)
def test_drift_without_a_comparison_computes(before: Any, now: Any) -> None:
    assert not DriftGate(9.0).decide(context(1, (0,), before=before, now=now)).reuse


def test_drift_in_half_precision_does_not_overflow() -> None:
    before = torch.full((100000,), 60000.0, dtype=torch.float16)
    assert DriftGate(1.0).decide(context(1, (0,), before=before, now=before)).score == 0.0


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf")])
def test_a_verdict_with_such_a_score_is_unsound(score: float) -> None:
    assert not Verdict(True, score).is_sound
    assert Verdict(True, None).is_sound


@pytest.mark.parametrize(
    ("interval", "anchor", "computed"), [(1, 0, range(10)), (3, 0, (0, 3, 6, 9)), (4, 2, (2, 6)), (5, 1, (1, 6))]
)
def test_interval(interval: int, anchor: int, computed: Any) -> None:
    gate = IntervalGate(interval, anchor)
    assert [s for s in range(anchor, 10) if not gate.decide(context(s, (0,))).reuse] == list(computed)


def test_magnitude_accumulates_from_the_last_computed_step() -> None:
    gate = MagnitudeGate({"": [1.0, 0.9, 0.8, 1.1, 1.0] + [1.0] * 5}, 10.0, 10)
    assert gate.decide(context(1, (0,))).score == pytest.approx(0.1)
    assert gate.decide(context(2, (0,))).score == pytest.approx(0.1 + (1 - 0.72))
    assert gate.decide(context(3, (0, 2))).score == pytest.approx(0.1)
    assert gate.decide(context(3, (0,))).score == pytest.approx(0.1 + 0.28 + abs(1 - 0.792))


def test_magnitude_threshold() -> None:
    gate = MagnitudeGate({"": [1.0] * 10}, 0.0, 10)
    assert not gate.decide(context(3, (2,))).reuse, "threshold 0 never skips, even at no error"
    assert MagnitudeGate({"": [1.0] * 10}, 1e-9, 10).decide(context(3, (2,))).reuse


def test_magnitude_per_branch() -> None:
    gate = MagnitudeGate({"cond": [1.0, 0.5], "uncond": [1.0, 0.75]}, 1.0, 2)
    assert gate.decide(context(1, (0,), steps=2, branch="cond")).score == pytest.approx(0.5)
    assert gate.decide(context(1, (0,), steps=2, branch="uncond")).score == pytest.approx(0.25)
    named = MagnitudeGate({"": [1.0, 0.5], "uncond": [1.0, 0.75]}, 1.0, 2)
    assert named.decide(context(1, (0,), steps=2, branch="cond")).score == pytest.approx(0.5)


def test_magnitude_resamples_to_the_real_number_of_steps() -> None:
    gate = MagnitudeGate({"": [1.0, 0.9, 0.9, 0.9, 0.9]}, 9.0, 28)
    assert gate.decide(context(2, (1,), steps=3)).score == pytest.approx(1 - 0.81)
    assert gate.decide(context(1, (0,), steps=5)).score == pytest.approx(0.1)


def test_magnitude_on_a_bare_denoiser_assumes_the_configured_steps() -> None:
    gate = MagnitudeGate({"": [1.0, 0.9, 0.9, 0.9, 0.9]}, 9.0, 3)
    assert gate.decide(context(2, (1,), steps=None)).score == pytest.approx(1 - 0.81)
    assert gate.decide(context(7, (6,), steps=None)).score == 0.0, "past the end: no change known"


curves = st.lists(st.floats(0.5, 2.0), min_size=2, max_size=40)


@settings(max_examples=60, deadline=None)
@given(curves, st.integers(2, 60))
def test_resampling_keeps_the_product(ratios: list[float], steps: int) -> None:
    assert len(resample_ratios(ratios, steps)) == steps
    assert math.prod(resample_ratios(ratios, steps)) == pytest.approx(math.prod(ratios), rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(curves)
def test_resampling_to_the_same_length_changes_nothing(ratios: list[float]) -> None:
    assert resample_ratios(ratios, len(ratios)) == pytest.approx(ratios)


def test_resampling_there_and_back() -> None:
    smooth = [1.0] + [0.98] * 12
    assert resample_ratios(resample_ratios(smooth, 25), 13) == pytest.approx(smooth)
    assert resample_ratios([1.0, 0.9], 1) == [1.0]
    with pytest.raises(ValueError, match="at least 1"):
        resample_ratios([1.0], 0)
    with pytest.raises(ValueError, match="empty"):
        resample_ratios([], 3)


def objections(guards: Guards, steps: int | None = 10, consecutive: int = 0) -> list[str | None]:
    filled = History(1)
    filled.push(Entry(0))
    return [guards.objection(View(0, step, steps, "scheduler"), filled, consecutive) for step in range(10)]


def test_guards() -> None:
    assert Guards().objection(View(0, 5, 10, "scheduler"), History(1), 0) is not None, "nothing to reuse"
    assert [item is None for item in objections(Guards())] == [False] + [True] * 9
    assert [item is None for item in objections(Guards(warmup=3))] == [False] * 3 + [True] * 7
    assert [item is None for item in objections(Guards(warmup=0))] == [True] * 10
    assert [item is None for item in objections(Guards(warmup=0, stop=7))] == [True] * 7 + [False] * 3
    assert set(objections(Guards(warmup=0, max_consecutive=2), consecutive=2)) == {CAP_REASON}
    assert set(objections(Guards(warmup=0, max_consecutive=2), consecutive=1)) == {None}


def test_warm_up_given_as_steps_and_as_a_ratio() -> None:
    """U15."""
    for steps in (5, 10, 28, 50):
        for ratio in (0.1, 0.2, 0.4):
            count = round(steps * ratio)
            assert (
                objections(Guards(warmup=count, retention=0), steps)
                == objections(Guards(warmup=0, retention=ratio), steps)
                or count > 10
            )
    assert objections(Guards(warmup=0, retention=0.4), 10) == objections(Guards(warmup=4), 10)
    assert objections(Guards(warmup=0, retention=0.4, assumed=10), None) == objections(Guards(warmup=4), 10)


def test_gates_keep_nothing() -> None:
    """Pure: the same question has the same answer, whatever was asked in between."""
    gates = (DriftGate(0.3), IntervalGate(3, 0), MagnitudeGate({"": [1.0, 0.9, 0.8] * 4}, 0.2, 12))
    asked = context(4, (1, 3), before=torch.ones(3), now=torch.full((3,), 1.1))
    for gate in gates:
        before = copy.deepcopy(gate)
        first = gate.decide(asked)
        for step in range(5, 9):
            gate.decide(context(step, (1, 3), before=torch.ones(3), now=torch.zeros(3)))
        assert gate.decide(asked) == first
        assert gate == before
