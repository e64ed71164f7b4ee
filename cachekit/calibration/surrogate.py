"""What a schedule costs in fidelity, estimated from one uncached run in well under a millisecond.

With V_t the model outputs of an uncached run, b_t their influence on the final latents and G_st = <V_s, V_t> averaged
over samples, a cached run whose computed outputs are taken to be those of the uncached run ends at a distance
|sum_t c_t V_t|, whose square is c' G c. Every skipped step chooses the weights that make the error reached so far
smallest, as the closed-loop fit does with the real model. Neglected is how the model answers to latents that are
already off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cachekit.calibration.fit import extrapolation
from cachekit.calibration.trajectory import Trajectory

Array = npt.NDArray[np.float64]
Row = tuple[tuple[int, ...], tuple[float, ...]]


def gram_matrix(*references: Trajectory) -> Array:
    """Inner products between the model outputs of runs, (steps, steps), averaged over all their samples.

    Divided by the number of values in a sample, so that the diagonal holds mean squares.
    """
    steps = len(references[0])
    products, samples, size = torch.zeros(steps, steps, dtype=torch.float64), 0, 1
    for reference in references:
        outputs = torch.stack([step.output.flatten(1).float() for step in reference.steps])
        for sample in range(outputs.shape[1]):
            values = outputs[:, sample].double()
            products += (values @ values.T).cpu()
        samples, size = samples + outputs.shape[1], outputs.shape[2]
    result: Array = (products / (samples * size)).numpy()
    return result


@dataclass(frozen=True)
class Surrogate:
    """Estimated error of schedules.

    Attributes:
        gram: (steps, steps), see :func:`gram_matrix`.
        influence: (steps,), see :func:`cachekit.calibration.influence.influences`.
        depth: number of results that a prediction combines.
        ridge: pull of the weights towards the order-1 extrapolation.
        starts: steps at which a denoiser begins its work, which compute and have nothing before them to predict from.
    """

    gram: Array
    influence: Array
    depth: int
    ridge: float = 1e-3
    starts: tuple[int, ...] = (0,)

    @property
    def steps(self) -> int:
        return len(self.influence)

    def error(self, schedule: Sequence[int]) -> float:
        """Estimated mean square error of the final latents when only these steps are computed."""
        return self._walk(schedule)[1]

    def rows(self, schedule: Sequence[int]) -> dict[int, Row]:
        """Skipped step -> (steps whose results are combined, newest first; the weights that the estimate chose)."""
        return self._walk(schedule)[0]

    def error_of(self, schedule: Sequence[int], rows: Mapping[int, Row]) -> float:
        """Estimated mean square error of the final latents with given weights; rows that lack one extrapolate."""
        computed, off = frozenset((*schedule, *self.starts)), np.zeros(self.steps)
        sources: list[int] = []
        for step in range(self.steps):
            sources = [] if step in self.starts else sources
            if step in computed:
                sources.insert(0, step)
                continue
            used = tuple(sources[: self.depth])
            known = rows.get(step, (used, tuple(extrapolation(step, used))))
            off[step] -= self.influence[step]
            for source, weight in zip(*known, strict=True):
                off[source] += self.influence[step] * weight
        return max(float(off @ self.gram @ off), 0.0)

    def _walk(self, schedule: Sequence[int]) -> tuple[dict[int, Row], float]:
        computed = frozenset((*schedule, *self.starts))
        sources: list[int] = []
        rows: dict[int, Row] = {}
        off = np.zeros(self.steps)
        for step in range(self.steps):
            if step in self.starts:
                sources = []
            if step in computed:
                sources.insert(0, step)
            else:
                used = tuple(sources[: self.depth])
                off, weights = self._skip(step, used, off)
                rows[step] = used, (1.0 - sum(weights), *weights)
        return rows, max(float(off @ self.gram @ off), 0.0)

    def _skip(self, step: int, sources: Sequence[int], off: Array) -> tuple[Array, list[float]]:
        """The error, as coefficients of the outputs, after a skipped step, and the weights of all but the newest."""
        factor = self.influence[step]
        off = off.copy()
        off[step] -= factor
        off[sources[0]] += factor
        if len(sources) < 2:
            return off, []
        basis = np.zeros((len(sources) - 1, self.steps))
        for row, source in enumerate(sources[1:]):
            basis[row, source] += factor
            basis[row, sources[0]] -= factor
        projected = basis @ self.gram
        normal = projected @ basis.T
        damping = self.ridge * max(float(np.trace(normal)) / len(normal), 1e-30)
        prior = np.array(extrapolation(step, sources)[1:])
        weights = np.linalg.solve(normal + damping * np.eye(len(normal)), damping * prior - projected @ off)
        return off + weights @ basis, [float(weight) for weight in weights]
