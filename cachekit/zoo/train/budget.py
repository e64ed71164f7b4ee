"""Learning-rate schedules that end by steps or by the wall clock."""

from __future__ import annotations

import math
import time


class Budget:
    """Progress from 0 to 1 through a number of steps or of minutes, whichever is given.

    With minutes, progress is time spent (over all resumed parts) divided by time allowed, so the decay always reaches
    its end; with steps a run is repeatable to the bit.
    """

    def __init__(self, steps: int | None, minutes: float | None, spent: float = 0.0) -> None:
        if steps is None and minutes is None:
            raise ValueError("give a number of steps or of minutes")
        self.steps = steps
        self.minutes = minutes
        self._start = time.monotonic() - spent

    @property
    def seconds(self) -> float:
        """Seconds spent, including those before a resume."""
        return time.monotonic() - self._start

    def progress(self, step: int) -> float:
        """Return the fraction of the budget that is used before this step, at most 1."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        assert self.minutes is not None
        return min(1.0, self.seconds / (60.0 * self.minutes))


def learning_rate(peak: float, step: int, progress: float, warmup: int) -> float:
    """Linear warm-up over ``warmup`` steps, then constant to 50 % of the budget, then a cosine to 1 % of the peak."""
    rise = min(1.0, (step + 1) / warmup)
    fall = max(0.0, (progress - 0.5) / 0.5)
    return peak * rise * (0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * fall)))
