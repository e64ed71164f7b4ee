"""Targets, cliffs and verdicts on made-up measurements."""

from __future__ import annotations

import math

import pytest

from cachekit.calibration.cliffs import find_cliffs
from cachekit.calibration.target import Target
from cachekit.calibration.verdict import judge

from .tuning import measured

TWICE = Target(speedup=2.0)


def test_the_best_of_a_speed_is_the_most_faithful_that_reaches_it() -> None:
    slow, exact, fast = measured(1, 1.5, 50), measured(2, 2.0, 40), measured(3, 3.0, 45)
    assert TWICE.best([slow, exact]) is exact
    assert TWICE.best([slow, exact, fast]) is fast, "faster and better"
    assert TWICE.best([slow]) is None
    assert TWICE.nearest([slow, measured(0, 1.2, 60)]) is slow
    assert TWICE.reached(measured(1, 1.97, 40))
    assert not TWICE.reached(measured(1, 1.9, 40))
    assert TWICE.reached(measured(1, 1.9, 40), slack=0.05)


def test_the_best_of_a_quality_is_the_fastest_that_reaches_it() -> None:
    target = Target(min_psnr=30.0)
    careful, good, bad = measured(1, 1.5, 50), measured(2, 2.5, 31), measured(3, 4.0, 29)
    assert target.best([careful, good, bad]) is good
    assert target.best([bad]) is None
    assert target.best([measured(0, 1.0, 100)]) is None, "computes everything"
    assert target.too_fast(bad)
    assert not target.too_fast(good)
    odd = measured(4, 3.0, (60.0,) * 8 + (10.0,) * 2)
    assert not target.reached(odd), "the 5th percentile counts, not the mean"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one"),
        ({"speedup": 2.0, "min_psnr": 30.0}, "exactly one"),
        ({"speedup": 1.0}, "above 1"),
        ({"speedup": math.nan}, "above 1"),
        ({"speedup": math.inf}, "above 1"),
        ({"min_psnr": 0.0}, "between 0 and 100"),
        ({"min_psnr": 100.0}, "between 0 and 100"),
        ({"speedup": 2.0, "by": "luck"}, "one of work, calls, time"),
    ],
)
def test_bad_targets(given: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=message):
        Target(**given)


def test_cliffs_are_small_changes_with_large_effects() -> None:
    smooth = [measured(0.1, 1.5, 45), measured(0.105, 1.55, 44), measured(0.11, 1.6, 43)]
    assert find_cliffs(smooth) == ()
    far = [measured(0.1, 1.5, 45), measured(0.2, 2.5, 30)]
    assert find_cliffs(far) == (), "a large change may have a large effect"
    (loss,) = find_cliffs([*smooth, measured(0.112, 1.6, 38)])
    assert loss.loss == pytest.approx(5)
    assert loss.jump == pytest.approx(1)
    (jump,) = find_cliffs([measured(0.1, 1.5, 45), measured(0.101, 2.5, 44)])
    assert jump.jump == pytest.approx(5 / 3)
    assert "cliff between 0.1 and 0.101" in str(jump)


def test_worth_it_when_better_than_fewer_steps() -> None:
    best, control = measured(0.1, 2.0, (45.0, 40.0)), measured(10, 2.0, (30.0, 41.0), "fewer steps")
    verdict = judge(TWICE, best, control, [best], 28)
    assert verdict.worth_it
    assert "better on 1 of 2 pictures" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("best", "control", "steps", "reason"),
    [
        (measured(1, 2.0, 40), measured(10, 2.0, 40, "fewer steps"), 28, "as good as first_block or better"),
        (measured(1, 2.0, 40), measured(10, 2.0, 50, "fewer steps"), 28, "as good as first_block or better"),
        (measured(1, 2.0, 27), measured(2, 2.0, 25, "fewer steps"), 4, "with 4 steps there is little to reuse"),
        (measured(1, 2.0, 18), measured(10, 2.0, 12, "fewer steps"), 28, "another picture"),
        (measured(1, 2.0, 40, time=1.01), measured(10, 2.0, 20, "fewer steps"), 28, "hardly any time"),
        (None, measured(10, 2.0, 20, "fewer steps"), 28, "no cache reaches speed-up 2x by work"),
    ],
    ids=["equal", "control better", "few steps", "another picture", "no time", "none"],
)
def test_not_worth_it(best, control, steps, reason) -> None:  # type: ignore[no-untyped-def]
    verdict = judge(TWICE, best, control, [best] if best else [], steps)
    assert not verdict.worth_it
    assert any(reason in text for text in verdict.reasons), verdict.reasons


def test_few_steps_are_worth_it_only_with_clear_figures() -> None:
    best, control = measured(1, 2.0, 40), measured(4, 2.0, 30, "fewer steps")
    assert judge(TWICE, best, control, [best], 8).worth_it
    assert not judge(TWICE, best, measured(4, 2.0, 38, "fewer steps"), [best], 8).worth_it


def test_a_quality_is_judged_by_speed() -> None:
    target = Target(min_psnr=30.0)
    best = measured(1, 2.5, 33)
    slower, faster = measured(12, 1.7, 31, "fewer steps"), measured(7, 3.0, 31, "fewer steps")
    assert judge(target, best, slower, [best], 28).worth_it
    verdict = judge(target, best, faster, [best], 28)
    assert not verdict.worth_it
    assert "as fast as first_block or faster" in verdict.reasons[0]
