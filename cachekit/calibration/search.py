"""Search for the computed steps: local moves from several starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

Schedule = tuple[int, ...]
Objective = Callable[[Schedule], float]


class Memo:
    """An objective that remembers what it was asked, and how often it really had to be evaluated."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self.known: dict[Schedule, float] = {}

    def __call__(self, schedule: Schedule) -> float:
        if schedule not in self.known:
            self.known[schedule] = self._objective(schedule)
        return self.known[schedule]

    def best(self) -> Schedule:
        """The best schedule seen."""
        return min(self.known, key=lambda schedule: (self.known[schedule], schedule))


def spread(steps: int, computed: int, fixed: Sequence[int] = (0,)) -> Schedule:
    """`computed` of `steps` steps, evenly spread, with step 0 and the other `fixed` ones among them."""
    even = [int(step) for step in np.linspace(0, steps - 1, computed).round()] if computed > 1 else [0]
    chosen = set(even)
    for step in sorted(set(fixed) - chosen):
        chosen.remove(min(chosen - set(fixed), key=lambda other: abs(other - step)))
        chosen.add(step)
    return tuple(sorted(chosen))


def shortlist(
    objective: Objective, steps: int, computed: int, starts: int, seed: int, fixed: Sequence[int] = (0,)
) -> list[Schedule]:
    """Good schedules by descent from an even and from random starts, the best first.

    Args:
        objective: cheap; smaller is better.
        steps: number of steps of the run.
        computed: number of steps to compute.
        starts: number of starts.
        seed: of the random starts.
        fixed: steps that every schedule computes, step 0 among them.
    """
    memo, random = Memo(objective), np.random.default_rng(seed)
    ends: set[Schedule] = set()
    for start in range(starts):
        first = spread(steps, computed, fixed) if not start else _random(steps, computed, random, fixed)
        ends.add(_descend(memo, first, steps, fixed))
    return sorted(ends, key=lambda schedule: (memo(schedule), schedule))


def refine(
    objective: Memo, start: Schedule, steps: int, evaluations: int, hint: Objective, fixed: Sequence[int] = (0,)
) -> Schedule:
    """Descent with a dear objective; of the moves from a schedule those come first that `hint` likes best.

    Args:
        objective: dear; smaller is better.
        start: where to begin.
        steps: number of steps of the run.
        evaluations: at most so many further schedules are evaluated.
        hint: a cheap estimate of the objective.
        fixed: steps that every schedule computes.
    """
    best, left = start, evaluations
    objective(best)
    improved = True
    while improved and left > 0:
        improved = False
        moves = [move for move in _moves(best, steps, fixed) if move not in objective.known]
        for move in sorted(moves, key=lambda move: (hint(move), move)):
            if left <= 0:
                break
            left -= 1
            if objective(move) < objective(best):
                best, improved = move, True
                break
    return best


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation of two lists without ties; NaN for fewer than three values."""
    if len(first) < 3:
        return float("nan")
    ranks = [np.argsort(np.argsort(values)).astype(float) for values in (first, second)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _descend(objective: Memo, start: Schedule, steps: int, fixed: Sequence[int]) -> Schedule:
    best, improved = start, True
    while improved:
        candidate = min(_moves(best, steps, fixed), key=lambda move: (objective(move), move), default=best)
        improved = objective(candidate) < objective(best)
        best = candidate if improved else best
    return best


def _moves(schedule: Schedule, steps: int, fixed: Sequence[int]) -> Iterator[Schedule]:
    """Every schedule with one computed step put elsewhere; fixed steps stay."""
    for leaving in schedule:
        if leaving in fixed:
            continue
        rest = set(schedule) - {leaving}
        for entering in range(1, steps):
            if entering not in schedule:
                yield tuple(sorted(rest | {entering}))


def _random(steps: int, computed: int, random: np.random.Generator, fixed: Sequence[int]) -> Schedule:
    free = [step for step in range(steps) if step not in fixed]
    chosen = random.permutation(free)[: computed - len(fixed)]
    return tuple(sorted({*fixed, *(int(step) for step in chosen)}))
