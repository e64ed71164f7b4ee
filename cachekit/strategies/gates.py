"""Gates that several strategies can use. Pure: a gate keeps nothing between calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cachekit.engine.rules import GateContext, Measure, Verdict


@dataclass(frozen=True)
class DriftGate:
    """Reuse while the probe's residual has drifted by less than `threshold` since the last computed step.

    Score: mean |r - r0| / mean |r0| with r the residual now and r0 the one of the last computed step (the rule of
    ParaAttention's First Block Cache). One value is read back per decision.
    """

    threshold: float

    def decide(self, context: GateContext) -> Verdict:
        return self.measure(context).verdict(context)

    def measure(self, context: GateContext) -> Measure:
        newest = context.history.newest
        before = None if newest is None else newest.signal
        if before is None or context.signal is None or before.shape != context.signal.shape:
            return Measure(None, self._judge)
        before = before.to(device=context.signal.device)
        drift = (context.signal.float() - before.float()).abs_().mean() / before.float().abs().mean()
        return Measure(drift, self._judge)

    def _judge(self, score: float | None) -> Verdict:
        if score is None:
            return Verdict(False, reason="no probe residual to compare with")
        return Verdict(score < self.threshold, score, f"drift {'<' if score < self.threshold else '>='} threshold")


@dataclass(frozen=True)
class IntervalGate:
    """Compute every `interval`-th step, counted from the last warm-up step `anchor`; reuse in between."""

    interval: int
    anchor: int

    def decide(self, context: GateContext) -> Verdict:
        computes = self.computes(context.branch, context.now.step, context.now.steps)
        return Verdict(not computes, reason="interval step" if computes else "between interval steps")

    def computes(self, branch: str, step: int, steps: int | None) -> bool:
        return (step - self.anchor) % self.interval == 0


@dataclass(frozen=True)
class WindowGate:
    """Inside a window of noise levels compute every `interval`-th step, outside of it every step.

    The interval counts from the last computed step. Levels go from 0 (clean) to 1000 (noise); both ends of the window
    are outside. Reads nothing back.

    Attributes:
        interval: distance between computed steps inside the window; 1 computes them all.
        window: lower and upper end.
        level: tells the level in place of the clock; None answers count as unknown, and unknown computes.
    """

    interval: int
    window: tuple[float, float]
    level: Callable[[], Any] | None = None

    def decide(self, context: GateContext) -> Verdict:
        level = context.now.level if self.level is None else self._told(context)
        if level is None:
            return Verdict(False, reason="the noise level of this step is not known")
        if not self.window[0] < level < self.window[1]:
            return Verdict(False, reason="outside the timestep window")
        due = context.now.step - context.history.steps[0] >= self.interval
        return Verdict(not due, reason="interval step" if due else "between interval steps", refreshes=due)

    def _told(self, context: GateContext) -> float | None:
        assert self.level is not None
        level = self.level()
        return context.read(level) if isinstance(level, torch.Tensor) else None if level is None else float(level)


@dataclass(frozen=True)
class MagnitudeGate:
    """Reuse while the accumulated error of the calibrated magnitude ratios stays below `threshold`.

    With g_j the ratio of step j and s the last computed step, skipping up to step t costs
    sum over k in (s, t] of |1 - prod over j in (s, k] of g_j| (Ma et al., "MagCache", 2025). Reads nothing back.

    Attributes:
        ratios: branch -> ratio per step, measured at any number of steps; "" serves branches that are not named.
        steps: number of steps to assume when no scheduler tells.
    """

    ratios: Mapping[str, Sequence[float]]
    threshold: float
    steps: int

    def decide(self, context: GateContext) -> Verdict:
        ratios = self._at(context.branch, context.now.steps or self.steps)
        product, error = 1.0, 0.0
        for step in range(context.history.steps[0] + 1, context.now.step + 1):
            product *= ratios[step] if step < len(ratios) else 1.0
            error += abs(1.0 - product)
        below = error < self.threshold
        return Verdict(below, error, f"accumulated error {'<' if below else '>='} threshold")

    def _at(self, branch: str, steps: int) -> Sequence[float]:
        ratios = self.ratios.get(branch) or self.ratios.get("") or next(iter(self.ratios.values()))
        return ratios if len(ratios) == steps else resample_ratios(ratios, steps)


def resample_ratios(ratios: Sequence[float], steps: int) -> list[float]:
    """Ratios measured at `len(ratios)` steps as they would be at `steps` steps over the same noise levels.

    A step that replaces several takes the product of their ratios: the running product is read off, linearly in its
    logarithm, at evenly spread positions.
    """
    import numpy as np

    if not len(ratios) or steps < 1:
        raise ValueError("ratios must not be empty and steps must be at least 1")
    level = np.cumsum(np.log(np.asarray(ratios, dtype=np.float64)))
    at = np.interp(np.linspace(0.0, 1.0, steps), np.linspace(0.0, 1.0, len(ratios)), level)
    return [float(ratios[0]), *np.exp(np.diff(at)).tolist()]
