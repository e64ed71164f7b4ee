"""How much each model output weighs in the final latents, found by probing the scheduler."""

from __future__ import annotations

import copy

import torch

from cachekit.calibration.trajectory import Trajectory, advance, twin_of

_PROBE = 1e-2
_TOLERANCE = 2e-2


class NotAffineError(ValueError):
    """The scheduler's steps do not depend linearly on the model outputs."""


def influences(reference: Trajectory) -> list[float]:
    """Factor of each step's model output in the final latents.

    The scheduler's run is replayed on the recorded outputs of one sample, each time with one output changed a little;
    in a scheduler whose steps are affine in the output (Euler, DDIM, Heun, DPM-Solver, UniPC, ancestral samplers with
    their noise held fixed) the final latents move by a fixed multiple of that change.

    Args:
        reference: an uncached run.

    Returns:
        One number per step.

    Raises:
        NotAffineError: the latents moved in another direction than the output did (thresholding, clipping).
    """
    size = slice(0, 1)
    probe = reference.steps[0].output[size].float()
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(probe.shape, generator=generator).to(probe.device) * probe.abs().mean().clamp_min(1e-6)
    base = _replayed(reference, size, None, None)
    found = []
    for step in range(len(reference)):
        moved = _replayed(reference, size, step, _PROBE * direction) - base
        factor = float((moved * direction).sum() / (direction * direction).sum())
        off = float((moved - factor * direction).norm() / moved.norm().clamp_min(1e-30))
        if off > _TOLERANCE and float(moved.norm()) > _TOLERANCE * _PROBE * float(direction.norm()):
            raise NotAffineError(
                f"the scheduler's step {step} is not linear in the model output ({off:.0%} of the change goes another "
                f"way); calibrated coefficients do not fit it"
            )
        found.append(factor / _PROBE)
    return found


def _replayed(reference: Trajectory, size: slice, step: int | None, change: torch.Tensor | None) -> torch.Tensor:
    """Final latents of one sample, in float64, with the output of one step changed."""
    scheduler = twin_of(reference.scheduler)
    sample: torch.Tensor = reference.steps[0].arguments["sample"][size].double()
    for index, record in enumerate(reference.steps):
        output = record.output[size].double()
        if index == step and change is not None:
            output = output + change.double()
        arguments = {name: _first(value, len(record.output), size) for name, value in record.arguments.items()}
        sample = advance(scheduler, copy.copy(arguments), output, sample).double()
    return sample


def _first(value: object, batch: int, size: slice) -> object:
    """The part of an argument that belongs to the samples of `size`."""
    if isinstance(value, list) and len(value) == batch:
        return value[size]
    if isinstance(value, torch.Tensor) and value.ndim and len(value) == batch:
        return value[size]
    return value
