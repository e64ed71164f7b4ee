"""How noisy the latents are at every entry of a schedule, in one unit for all schedulers.

The unit is the share s of noise in x = (1 - s) * signal + s * noise, which is what flow matching calls sigma. Any other
schedule is brought to it through its ratio k of noise to signal, which scaling the latents does not change:
s = k / (1 + k). A signal has unit variance, or `sigma_data` where the scheduler says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class NoiseLevels:
    """The share of noise, 0..1, of every entry of a scheduler's timesteps, and what told it."""

    values: tuple[float, ...]
    source: str


@dataclass(frozen=True)
class TimeScale:
    """Timesteps read as noise where nothing else tells.

    Attributes:
        top: the largest timestep seen; above 1 the scale is 0..1000, else 0..1.
        rising: True where timesteps grow during sampling, so that 0 is pure noise.
    """

    top: float
    rising: bool

    def noise(self, timestep: float) -> float:
        """Share of noise, 0..1."""
        share = min(max(timestep / (1000.0 if self.top > 1.0 else 1.0), 0.0), 1.0)
        return 1.0 - share if self.rising else share


def noise_levels(scheduler: Any, timesteps: Sequence[float]) -> NoiseLevels:
    """Noise levels of a diffusers scheduler that has been set up; copies values once.

    Known definitions, the first that fits: angles (x = cos(t) signal + sin(t) noise); `sigmas`, taken as they are for
    flow matching and as the ratio of noise to signal otherwise; `alphas_cumprod` at the timesteps, between which it is
    interpolated; amplitudes (`alphas`, `betas` with alphas^2 + betas^2 = 1); a function of the timestep
    (`_alpha_cumprod`); `schedule`, a table of ratios by timestep. Where none fits, the timesteps are scaled.
    """
    for source, definition in _DEFINITIONS.items():
        values = definition(scheduler, timesteps)
        if values is not None and all(math.isfinite(value) for value in values):
            return NoiseLevels(tuple(min(max(value, 0.0), 1.0) for value in values), f"the scheduler's {source}")
    scale = TimeScale(max(timesteps), rising=timesteps[0] < timesteps[-1])
    return NoiseLevels(tuple(scale.noise(timestep) for timestep in timesteps), "the scheduler's timesteps")


Levels = list[float] | None


def _angles(scheduler: Any, timesteps: Sequence[float]) -> Levels:
    if _setting(scheduler, "prediction_type") != "trigflow":
        return None
    return [_share(math.cos(timestep), math.sin(timestep)) for timestep in timesteps]


def _sigmas(scheduler: Any, timesteps: Sequence[float]) -> Levels:
    sigmas = _numbers(scheduler, "sigmas", len(timesteps))
    if sigmas is None or any(hasattr(scheduler, name) for name in _NOT_BY_ENTRY):
        return None
    sigmas = sigmas[: len(timesteps)]
    if _is_flow(scheduler, sigmas):
        return sigmas
    data = _setting(scheduler, "sigma_data") or 1.0
    return [_share(data, sigma) for sigma in sigmas]


# Schedulers whose sigmas are no noise levels of their entries: every other entry lies between two of them; they count
# within one of several stages. Their timesteps tell.
_NOT_BY_ENTRY = ("sigmas_interpol", "sigmas_per_stage")


def _is_flow(scheduler: Any, sigmas: Sequence[float]) -> bool:
    if _setting(scheduler, "use_flow_sigmas") or _setting(scheduler, "prediction_type") == "flow_prediction":
        return True
    is_ratio = hasattr(scheduler, "alphas_cumprod") or _setting(scheduler, "sigma_data") is not None
    return not is_ratio and all(0.0 <= sigma <= 1.0 for sigma in sigmas)


def _amplitudes(scheduler: Any, timesteps: Sequence[float]) -> Levels:
    signal = _numbers(scheduler, "alphas", len(timesteps))
    noise = _numbers(scheduler, "betas", len(timesteps))
    if signal is None or noise is None:
        return None
    pairs = list(zip(signal, noise, strict=False))[: len(timesteps)]
    if any(abs(a * a + b * b - 1.0) > 1e-3 for a, b in pairs):
        return None
    return [_share(a, b) for a, b in pairs]


def _alphas_cumprod(scheduler: Any, timesteps: Sequence[float]) -> Levels:
    table = _numbers(scheduler, "alphas_cumprod", 1)
    if table is None or min(timesteps) < 0 or max(timesteps) > len(table):
        return None
    return [_of_variances(_interpolated(table, timestep)) for timestep in timesteps]


def _function(scheduler: Any, timesteps: Sequence[float]) -> Levels:
    function = getattr(scheduler, "_alpha_cumprod", None)
    if not callable(function):
        return None
    device = torch.device("cpu")
    table = function(torch.tensor(list(timesteps), device=device), device)
    return [_of_variances(value) for value in table.tolist()]


def _schedule(scheduler: Any, timesteps: Sequence[float]) -> Levels:
    table = _numbers(scheduler, "schedule", len(timesteps))
    if table is None or min(timesteps) < 0 or max(timesteps) > len(table) - 1:
        return None
    return [_share(1.0, _interpolated(table, timestep)) for timestep in timesteps]


_DEFINITIONS: dict[str, Callable[[Any, Sequence[float]], Levels]] = {
    "angles": _angles,
    "sigmas": _sigmas,
    "alphas_cumprod": _alphas_cumprod,
    "amplitudes": _amplitudes,
    "alpha_cumprod function": _function,
    "schedule": _schedule,
}


def _share(signal: float, noise: float) -> float:
    """noise / (signal + noise); no noise in nothing."""
    total = abs(signal) + abs(noise)
    return abs(noise) / total if total else 0.0


def _of_variances(signal: float) -> float:
    """The share of noise where the variances of signal and noise sum to one."""
    signal = min(max(signal, 0.0), 1.0)
    return _share(math.sqrt(signal), math.sqrt(1.0 - signal))


def _interpolated(table: Sequence[float], position: float) -> float:
    low = min(int(position), len(table) - 1)
    high = min(low + 1, len(table) - 1)
    return table[low] + (table[high] - table[low]) * (position - low)


def _numbers(scheduler: Any, name: str, least: int) -> list[float] | None:
    """A one-dimensional tensor of at least `least` values as numbers."""
    tensor = getattr(scheduler, name, None)
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 1 or len(tensor) < least:
        return None
    return [float(value) for value in tensor.detach().cpu().tolist()]


def _setting(scheduler: Any, name: str) -> Any:
    return getattr(getattr(scheduler, "config", None), name, None)
