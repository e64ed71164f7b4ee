"""What a schedule costs in fidelity, estimated from one uncached run in well under a millisecond.

With V_t the model outputs of an uncached run, b_t their influence on the final latents and G_st = <V_s, V_t> averaged
over samples, a cached run whose computed outputs are taken to be those of the uncached run ends at a distance
|sum_t c_t V_t|, whose square is c' G c. Every skipped step chooses the weights that make the error reached so far
smallest, as the closed-loop fit does with the real model. Neglected is how the model answers to latents that are
already off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cachekit.calibration.trajectory import Trajectory

Array = npt.NDArray[np.float64]


def gram_matrix(reference: Trajectory) -> Array:
    """Inner products between the model outputs of a run, (steps, steps), averaged over the samples of the batch.

    Divided by the number of values in a sample, so that the diagonal holds mean squares.
    """
    outputs = torch.stack([step.output.flatten(1).float() for step in reference.steps])
    products = torch.zeros(len(outputs), len(outputs), dtype=torch.float64)
    for sample in range(outputs.shape[1]):
        values = outputs[:, sample].double()
        products += (values @ values.T).cpu()
    result: Array = (products / (outputs.shape[1] * outputs.shape[2])).numpy()
    return result


@dataclass(frozen=True)
class Surrogate:
    """Estimated error of schedules.

    Attributes:
        gram: (steps, steps), see :func:`gram_matrix`.
        influence: (steps,), see :func:`cachekit.calibration.influence.influences`.
        depth: number of results that a prediction combines.
        ridge: pull of the weights towards the order-1 extrapolation.
    """

    gram: Array
    influence: Array
    depth: int
    ridge: float = 1e-3

    @property
    def steps(self) -> int:
        return len(self.influence)

    def error(self, schedule: Sequence[int]) -> float:
        """Estimated mean square error of the final latents when only these steps are computed."""
        computed = frozenset(schedule)
        sources: list[int] = []
        off = np.zeros(self.steps)
        for step in range(self.steps):
            if step in computed:
                sources.insert(0, step)
            else:
                off = self._skip(step, sources[: self.depth], off)
        return max(float(off @ self.gram @ off), 0.0)

    def _skip(self, step: int, sources: Sequence[int], off: Array) -> Array:
        """The error, as coefficients of the outputs, after a skipped step."""
        factor = self.influence[step]
        off = off.copy()
        off[step] -= factor
        off[sources[0]] += factor
        if len(sources) < 2:
            return off
        basis = np.zeros((len(sources) - 1, self.steps))
        for row, source in enumerate(sources[1:]):
            basis[row, source] += factor
            basis[row, sources[0]] -= factor
        projected = basis @ self.gram
        normal = projected @ basis.T
        damping = self.ridge * max(float(np.trace(normal)) / len(normal), 1e-30)
        prior = np.zeros(len(normal))
        prior[0] = -(step - sources[0]) / (sources[0] - sources[1])
        weights = np.linalg.solve(normal + damping * np.eye(len(normal)), damping * prior - projected @ off)
        result: Array = off + weights @ basis
        return result
