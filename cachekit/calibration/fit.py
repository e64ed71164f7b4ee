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
        gathered: step -> normal equations of runs of other prompts with the same schedule, which are solved together
            with this run's own; this run's are added.
        rows: what was found so far: step -> (source steps, weights).
    """

    scheduler: Any
    reference: Trajectory
    live: Trajectory
    depth: int
    gathered: dict[int, NormalEquations] = field(default_factory=dict)
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
        target = self.reference.steps[step].result.to(sample.device)
        own, earlier = normal_equations(landings, target), self.gathered.get(step)
        self.gathered[step] = own if earlier is None else own.plus(earlier)
        self.rows[step] = used, self.gathered[step].weights(extrapolation(step, used), _RIDGE)
        return self.rows[step][1]


@dataclass(frozen=True)
class NormalEquations:
    """A least-squares problem for weights that sum to 1: those of all candidates but the first are its unknowns.

    Attributes:
        gram: inner products of the differences to the first candidate, (unknowns, unknowns).
        moment: their inner products with the difference of the target to the first candidate, (unknowns,).
    """

    gram: torch.Tensor
    moment: torch.Tensor

    def plus(self, other: NormalEquations) -> NormalEquations:
        """The problem over the data of both."""
        return NormalEquations(self.gram + other.gram, self.moment + other.moment)

    def weights(self, prior: Sequence[float], ridge: float) -> tuple[float, ...]:
        """The solution; see :func:`affine_weights`."""
        start = torch.tensor(list(prior)[1:], dtype=torch.float64)
        damping = ridge * self.gram.diagonal().mean().clamp_min(1e-30) * torch.eye(len(start), dtype=torch.float64)
        solution = torch.linalg.solve(self.gram + damping, self.moment + damping @ start)
        found = [float(weight) for weight in solution]
        return (1.0 - sum(found), *found)


def normal_equations(candidates: Sequence[torch.Tensor], target: torch.Tensor) -> NormalEquations:
    """The problem of :func:`affine_weights`, on the CPU."""
    newest = candidates[0].double()
    basis = torch.stack([(candidate.double() - newest).flatten() for candidate in candidates[1:]], dim=1)
    rest = target.double().flatten() - newest.flatten()
    return NormalEquations((basis.T @ basis).cpu(), (basis.T @ rest).cpu())


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
    return normal_equations(candidates, target).weights(prior, ridge)


def extrapolation(step: int, sources: Sequence[int], order: int = 1) -> list[float]:
    """Weights of the extrapolation of `order` 0 or 1 from the results of `sources`, newest first."""
    if not order or len(sources) < 2:
        return [1.0, *[0.0] * (len(sources) - 1)]
    reach = (step - sources[0]) / (sources[0] - sources[1])
    return [1.0 + reach, -reach, *[0.0] * (len(sources) - 2)]


def plain_rows(
    schedule: Sequence[int], steps: int, depth: int, order: int, starts: Sequence[int] = (0,)
) -> dict[int, tuple[tuple[int, ...], tuple[float, ...]]]:
    """Skipped step -> (source steps, newest first; weights) of the extrapolation of `order` 0 or 1."""
    sources: list[int] = []
    rows = {}
    for step in range(steps):
        sources = [] if step in starts else sources
        if step in schedule or step in starts:
            sources.insert(0, step)
        else:
            used = tuple(sources[: max(1, min(depth, order + 1))])
            rows[step] = used, tuple(extrapolation(step, used, order))
    return rows
