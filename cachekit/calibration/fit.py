"""Closed-loop fit: coefficients that bring the latents of the cached run back to those of the uncached one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cachekit.calibration.trajectory import Trajectory, advance, twin_of

_RIDGE = 1e-3


@dataclass
class ClosedLoopFit:
    """Solves, at each skipped step of a live run, for the combination that lands on the reference.

    The scheduler's step is affine in the model output, so that it maps a combination with weights that sum to 1 to the
    same combination of results; the best next latents are therefore a least-squares problem with as many unknowns as
    results are combined, less one. It is solved over all samples of the batch at once, on the latents that the cached
    run has really reached: the errors of the steps before are part of it.

    Attributes:
        scheduler: the live pipeline's.
        reference: the uncached run of the same batch.
        live: the run in progress.
        depth: number of results to combine.
        rows: what was found so far: step -> (source steps, weights).
    """

    scheduler: Any
    reference: Trajectory
    live: Trajectory
    depth: int
    rows: dict[int, tuple[tuple[int, ...], tuple[float, ...]]] = field(default_factory=dict)

    def weights(self, step: int, sources: Sequence[int]) -> Sequence[float] | None:
        """See :class:`cachekit.strategies.schedule.Coefficients`."""
        used = tuple(sources[: self.depth])
        known = self.rows.get(step)
        if known is not None:
            return known[1] if known[0] == used else None
        if step != len(self.live) or step >= len(self.reference) or not step:
            return None
        if len(used) == 1:
            self.rows[step] = used, (1.0,)
            return (1.0,)
        arguments, sample = self.reference.steps[step].arguments, self.live.final
        outputs = [self.live.steps[i].output for i in used]
        landings = [advance(twin_of(self.scheduler), arguments, output, sample) for output in outputs]
        prior = _slope(step, used)
        self.rows[step] = used, affine_weights(landings, self.reference.steps[step].result, prior, _RIDGE)
        return self.rows[step][1]


def affine_weights(
    candidates: Sequence[torch.Tensor], target: torch.Tensor, prior: Sequence[float], ridge: float
) -> tuple[float, ...]:
    """Weights w that sum to 1 and minimise |sum w_i candidate_i - target|^2 + ridge |w - prior|^2 (scaled).

    Args:
        candidates: at least two tensors of one shape.
        target: of the same shape.
        prior: weights to stay near where the data do not tell.
        ridge: strength of the prior, relative to the mean square of the differences between candidates.
    """
    newest = candidates[0].double()
    basis = torch.stack([(candidate.double() - newest).flatten() for candidate in candidates[1:]], dim=1)
    rest = target.double().flatten() - newest.flatten()
    gram, moment = basis.T @ basis, basis.T @ rest
    start = torch.tensor(list(prior)[1:], dtype=torch.float64, device=gram.device)
    damping = ridge * gram.diagonal().mean().clamp_min(1e-30) * torch.eye(len(start), dtype=gram.dtype)
    solution = torch.linalg.solve(gram + damping.to(gram.device), moment + damping.to(gram.device) @ start)
    found = [float(weight) for weight in solution]
    return (1.0 - sum(found), *found)


def _slope(step: int, sources: Sequence[int]) -> list[float]:
    """Weights of the order-1 extrapolation."""
    reach = (step - sources[0]) / (sources[0] - sources[1])
    return [1.0 + reach, -reach, *[0.0] * (len(sources) - 2)]
