"""The surrogate, the fit and the search as plain mathematics."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cachekit.calibration.fit import affine_weights
from cachekit.calibration.search import Memo, rank_correlation, refine, shortlist, spread
from cachekit.calibration.surrogate import Surrogate


def surrogate(outputs: np.ndarray, influence: float = -0.1, depth: int = 3, ridge: float = 1e-9) -> Surrogate:
    """From outputs (steps, values)."""
    return Surrogate(outputs @ outputs.T / outputs.shape[1], np.full(len(outputs), influence), depth, ridge)


def curves(steps: int = 10, values: int = 40, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    at = np.linspace(0, 1, steps)[:, None]
    return np.cos(random.uniform(0, 4, values) * at + random.uniform(0, 3, values))


def test_a_full_schedule_costs_nothing() -> None:
    assert surrogate(curves()).error(range(10)) == 0.0


def test_linear_outputs_cost_nothing_once_two_are_known() -> None:
    line = np.arange(8)[:, None] * np.random.default_rng(0).normal(size=30) + 1.0
    assert surrogate(line).error((0, 1)) < 1e-12
    assert surrogate(line).error((0, 7)) > 1e-3


def test_reuse_of_one_result_by_hand() -> None:
    """Depth 1: every skipped step adds influence * (V_0 - V_t)."""
    outputs = curves(5)
    off = sum(-0.1 * (outputs[0] - outputs[t]) for t in range(1, 5))
    assert surrogate(outputs, depth=1).error((0,)) == pytest.approx(float((off**2).mean()))


def test_more_steps_do_not_cost_more_at_the_optimum() -> None:
    estimate = surrogate(curves(8)).error
    best = [min(estimate((0, *rest)) for rest in itertools.combinations(range(1, 8), n - 1)) for n in (2, 3, 4, 5)]
    assert best == sorted(best, reverse=True)


def test_shortlist_finds_the_best_of_a_small_problem() -> None:
    estimate = surrogate(curves(9)).error
    everything = {(0, *rest): estimate((0, *rest)) for rest in itertools.combinations(range(1, 9), 3)}
    found = shortlist(estimate, 9, 4, starts=8, seed=0)
    assert found[0] == min(everything, key=lambda schedule: everything[schedule])
    assert [estimate(schedule) for schedule in found] == sorted(estimate(schedule) for schedule in found)


def test_search_is_reproducible_and_bounded() -> None:
    truth = surrogate(curves(10, seed=1)).error
    hint = surrogate(curves(10, seed=2)).error
    asked: list[tuple[int, ...]] = []

    def dear(schedule: tuple[int, ...]) -> float:
        asked.append(schedule)
        return truth(schedule)

    first = refine(Memo(dear), spread(10, 4), 10, 6, hint)
    count = len(asked)
    assert count <= 7
    assert len(set(asked)) == count, "nothing is evaluated twice"
    assert truth(first) <= truth(spread(10, 4))
    assert refine(Memo(dear), spread(10, 4), 10, 6, hint) == first


@pytest.mark.parametrize(("steps", "computed"), [(28, 9), (5, 5), (7, 1), (2, 2), (1, 1)])
def test_spread(steps: int, computed: int) -> None:
    schedule = spread(steps, computed)
    assert len(set(schedule)) == computed
    assert schedule[0] == 0
    assert schedule[-1] < steps
    assert shortlist(lambda item: float(len(item)), steps, computed, 3, 0)


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert math.isnan(rank_correlation([1, 2], [1, 2]))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=3))
def test_weights_are_found_where_they_exist(chosen: list[float]) -> None:
    generator = torch.Generator().manual_seed(len(chosen))
    candidates = [torch.randn(6, 7, generator=generator) for _ in range(len(chosen) + 1)]
    weights = (1 - sum(chosen), *chosen)
    target = sum(w * c for w, c in zip(weights, candidates, strict=True))
    found = affine_weights(candidates, target, [1.0, *[0.0] * len(chosen)], ridge=1e-9)
    assert found == pytest.approx(weights, abs=1e-4)
    assert sum(found) == pytest.approx(1.0)


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_the_fit_is_never_worse_than_its_prior(ridge: float) -> None:
    """On the objective that is calibrated: reuse and the order-1 extrapolation are among its candidates."""
    generator = torch.Generator().manual_seed(3)
    candidates = [torch.randn(50, generator=generator) for _ in range(3)]
    target = torch.randn(50, generator=generator)

    def cost(weights: tuple[float, ...]) -> float:
        return float(((sum(w * c for w, c in zip(weights, candidates, strict=True)) - target) ** 2).sum())

    for prior in ((1.0, 0.0, 0.0), (2.5, -1.5, 0.0)):
        assert cost(affine_weights(candidates, target, prior, ridge)) <= cost(prior) + 1e-6


def test_candidates_that_are_equal_keep_the_prior() -> None:
    same = [torch.ones(5)] * 3
    assert affine_weights(same, torch.zeros(5), (1.5, -0.5, 0.0), 1e-3) == pytest.approx((1.5, -0.5, 0.0))
