"""The search along one axis: brackets, halves, stops."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachekit.calibration.bisection import Axis, Threshold, bracket, whole


def asked(axis: Axis, change: float, budget: int, careful_below: bool = True) -> list[float]:
    """Values asked for when the fast side begins at `change`."""
    values: list[float] = []

    def too_fast(value: float) -> bool:
        values.append(value)
        return value >= change if careful_below else value <= change

    bracket(axis, too_fast, lambda value: False, budget)
    return values


@settings(max_examples=60, deadline=None)
@given(change=st.floats(0.003, 3.5), start=st.floats(0.002, 4.0))
def test_a_threshold_is_enclosed(change: float, start: float) -> None:
    values = asked(Threshold(0.002, 4.0, start), change, 40)
    assert len(values) == len(set(values)) <= 20
    below, above = [v for v in values if v < change], [v for v in values if v >= change]
    assert below
    assert above
    assert min(above) / max(below) < 1.016


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 40), change=st.integers(0, 41), near=st.floats(0, 50), rising=st.booleans())
def test_a_whole_number_is_found(count: int, change: int, near: float, rising: bool) -> None:
    axis = whole(list(range(1, count + 1)), rising, near)
    values = asked(axis, change, 60, careful_below=rising)
    assert len(values) == len(set(values))
    if rising:
        fast = [v for v in range(1, count + 1) if v >= change]
    else:
        fast = [v for v in range(1, count + 1) if v <= change]
    if fast:
        assert (min(fast) if rising else max(fast)) in values, "the most careful one that is fast enough"


@pytest.mark.parametrize("budget", [0, 1, 2, 5])
def test_the_budget_is_kept(budget: int) -> None:
    assert len(asked(Threshold(0.001, 8.0, 0.1), 1.234, budget)) <= budget


def test_it_stops_where_nothing_better_is_to_be_expected() -> None:
    values: list[float] = []

    def too_fast(value: float) -> bool:
        values.append(value)
        return value >= 0.3

    bracket(Threshold(0.001, 8.0, 0.1), too_fast, lambda value: 0.25 < value < 0.35, 40)
    assert 0.25 < values[-1] < 0.35
    assert all(not 0.25 < value < 0.35 for value in values[:-1])


def test_all_on_one_side_ends_at_the_bound() -> None:
    assert asked(Threshold(0.01, 1.0, 0.1), 5.0, 40)[-1] == 1.0
    assert asked(Threshold(0.01, 1.0, 0.1), 0.0, 40)[-1] == 0.01
    assert asked(whole([2, 3, 4], True, 2), 99, 40) == [2, 3, 4]
