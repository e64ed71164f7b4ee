"""The noise level of a step on the scale of training timesteps, which is what windows of configs refer to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LEVELS = 1000.0
"""Pure noise on the scale of `View.level`."""


def timestep_levels(timesteps: Sequence[float], sigmas: Sequence[float], config: Mapping[str, Any]) -> list[float]:
    """Noise level from 0 to 1000 of each entry of a schedule; empty when it cannot be told.

    Timesteps that count from 0 to 1 or to `num_train_timesteps` say it themselves (flow matching: 1000 sigma). Others
    (the logarithm of sigma, for example) take it from sigma, as the share sigma / (1 + sigma) of the noise.

    Args:
        timesteps: the entries.
        sigmas: noise levels as the scheduler stores them, if it does.
        config: the scheduler's config; with `invert_sigmas` its timesteps rise towards the clean image.
    """
    trained = float(config.get("num_train_timesteps") or LEVELS)
    lowest, highest = min(timesteps), max(timesteps)
    if lowest >= 0 and highest <= 1:
        levels = [LEVELS * value for value in timesteps]
    elif lowest >= 0 and 2 < highest <= trained:
        levels = [LEVELS * value / trained for value in timesteps]
    else:
        levels = [LEVELS * sigma / (1 + sigma) for sigma in sigmas]
    return [LEVELS - level for level in levels] if config.get("invert_sigmas") else levels
