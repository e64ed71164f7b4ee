"""Samplers that draw fresh noise at every step: with few steps there is nothing to predict from."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from cachekit.calibration.trajectory import Trajectory, advance, twin_of

_LIMIT = 0.3


class StochasticSamplerError(ValueError):
    """Each step's noise hides what the step before it told, so that a skipped step cannot be predicted."""


def draws_noise(reference: Trajectory) -> bool:
    """True when a step of the run depends on random numbers: replayed with other ones it ends elsewhere."""
    first = reference.steps[0]
    results = [_replayed(reference, seed) for seed in (0, 1)]
    change = float((results[0] - results[1]).abs().max())
    return change > 1e-6 * float(first.result.float().abs().max())


def require_predictable(reference: Trajectory, errors: Sequence[float], computed: int) -> None:
    """Refuse a sampler that draws noise and whose run does not survive skips.

    Args:
        reference: the uncached run.
        errors: relative errors of the final latents with an even schedule, of each prompt.
        computed: number of steps which that schedule computes.

    Raises:
        StochasticSamplerError: the mean is above 0.3; the message gives it.
    """
    mean = sum(errors) / len(errors)
    if mean > _LIMIT and draws_noise(reference):
        raise StochasticSamplerError(
            f"{type(reference.scheduler).__name__} draws fresh noise at every step, and with {computed} of its "
            f"{len(reference)} steps computed the latents end {mean:.0%} off (the limit is {_LIMIT:.0%}), so caching "
            f"does not suit it. Take a deterministic scheduler, or more steps"
        )


def _replayed(reference: Trajectory, seed: int) -> torch.Tensor:
    """Latents after the first step with other random numbers."""
    scheduler, step = twin_of(reference.scheduler), reference.steps[0]
    arguments: dict[str, Any] = dict(step.arguments)
    if "generator" in inspect.signature(scheduler.step).parameters:
        arguments["generator"] = torch.Generator(step.output.device).manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return advance(scheduler, arguments, step.output, step.arguments["sample"]).float()
