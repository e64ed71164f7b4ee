"""Bisection along one axis of settings, from the careful end to the fast one, with a bounded number of evaluations."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

_CLOSE = 1.015
_STRIDE = 2.0
_DIGITS = 4


@dataclass(frozen=True)
class Threshold:
    """Real numbers on a logarithmic scale; larger is faster."""

    low: float
    high: float
    start: float

    def towards(self, value: float, fast: bool, stride: float) -> float | None:
        """A value `stride` doublings away; None where `value` is the end."""
        wanted = value * _STRIDE ** (stride if fast else -stride)
        found = _rounded(min(max(wanted, self.low), self.high))
        return None if found == value else found

    def between(self, careful: float, fast: float) -> float | None:
        """The middle; None where the two are too close to tell apart."""
        return None if fast / careful < _CLOSE else _rounded(math.sqrt(careful * fast))

    def beside(self, value: float, fast: bool, factor: float) -> float | None:
        """A close neighbour; None outside of the bounds."""
        found = _rounded(value * factor if fast else value / factor)
        return found if self.low <= found <= self.high else None


@dataclass(frozen=True)
class Whole:
    """Listed whole numbers, the careful one first."""

    values: tuple[int, ...]
    start: int

    def towards(self, value: float, fast: bool, stride: float) -> float | None:
        at = self.values.index(int(value))
        found = min(max(at + round(stride if fast else -stride), 0), len(self.values) - 1)
        return None if found == at else self.values[found]

    def between(self, careful: float, fast: float) -> float | None:
        first, last = self.values.index(int(careful)), self.values.index(int(fast))
        return None if last - first < 2 else self.values[(first + last) // 2]

    def beside(self, value: float, fast: bool, factor: float) -> float | None:
        """None: between whole numbers there are none."""
        return None


Axis = Threshold | Whole


def whole(values: list[int], careful_first: bool, near: float) -> Whole:
    """An axis over whole numbers that begins near a value.

    Args:
        values: at least one, in any order.
        careful_first: True when the smaller number is the careful one.
        near: where to begin.
    """
    rising = sorted(set(values))
    start = rising[min(bisect.bisect_left(rising, near), len(rising) - 1)]
    return Whole(tuple(rising if careful_first else reversed(rising)), start)


def bracket(axis: Axis, too_fast: Callable[[float], bool], done: Callable[[float], bool], budget: int) -> None:
    """Ask for values until the place where the answer changes is known as exactly as the axis or the budget allows.

    From the start the stride doubles until the answer changes, then the bracket is halved.

    Args:
        axis: where to look.
        too_fast: True on the fast side; dear, and asked at most once for a value.
        done: True at a value that nothing better is to be expected of.
        budget: at most so many values are asked for.
    """
    asked = 0

    def ask(value: float) -> bool:
        nonlocal asked
        asked += 1
        return too_fast(value)

    near, stride = axis.start, 1.0
    if budget < 1:
        return
    side = ask(near)
    while True:
        far = axis.towards(near, not side, stride)
        if far is None or asked >= budget or done(near):
            return
        if ask(far) != side:
            break
        near, stride = far, stride * 2
    careful, fast = (far, near) if side else (near, far)
    while asked < budget and not done(careful) and not done(fast):
        middle = axis.between(careful, fast)
        if middle is None:
            return
        if ask(middle):
            fast = middle
        else:
            careful = middle


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
