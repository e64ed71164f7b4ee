"""MagCache: calibrated ratios of residual magnitudes say how far a skip may go.

Method: Ma et al., "MagCache: Fast Video Generation with Magnitude-Aware Cache" (2025). The ratios belong to one
checkpoint and scheduler: calibrate first (`cachekit.calibrate_magnitudes`). Reads nothing back from the device, so it
suits compiled models; it does not look at the content.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import nn

from cachekit.engine.history import Entry
from cachekit.engine.rules import GateContext, Guards, Rule, StackSpec, Verdict
from cachekit.engine.stats import CALIBRATION_REASON
from cachekit.strategies.base import CacheConfig, config_class, strategy
from cachekit.strategies.gates import MagnitudeGate
from cachekit.strategies.predictors import Reuse
from cachekit.strategies.tunable import Sources, Tunable

FLUX_MAG_RATIOS: tuple[float, ...] = (
    *(1.0, 1.21094, 1.11719, 1.07812, 1.0625, 1.03906, 1.03125, 1.03906, 1.02344, 1.03125, 1.02344, 0.98047, 1.01562),
    *(1.00781, 1.0, 1.00781, 1.0, 1.00781, 1.0, 1.0, 0.99609, 0.99609, 0.98047, 0.98828, 0.96484, 0.95703, 0.93359),
    0.89062,
)
"""Ratios of FLUX.1 at 28 steps as published with MagCache; any other model has to be calibrated."""


class ProfileRatios(dict[str, tuple[float, ...]]):
    """Ratios with the profile that they come from."""

    profile: Any = None


def _ratios(value: Any) -> Any:
    """Ratios in any form: a list, a tensor, branch -> list, or a calibration result."""
    profile = value if hasattr(value, "require") else getattr(value, "profile", None)
    value = getattr(value, "ratios", getattr(value, "magnitudes", value))
    if value is None:
        return None
    named = value if isinstance(value, Mapping) else {"": value}
    ratios = {str(name): tuple(float(ratio) for ratio in _sequence(curve)) for name, curve in named.items()}
    if not ratios or not all(ratios.values()):
        raise ValueError("mag_ratios is empty; calibrate with cachekit.calibrate_magnitudes(pipe, prompts=...)")
    if not all(math.isfinite(ratio) and ratio > 0 for curve in ratios.values() for ratio in curve):
        raise ValueError("mag_ratios must be finite and positive; calibrate again")
    if profile is not None:
        ratios = ProfileRatios(ratios)
        ratios.profile = profile
    return ratios


def _sequence(curve: Any) -> Sequence[Any]:
    if isinstance(curve, torch.Tensor):
        return curve.flatten().tolist()  # type: ignore[no-any-return]
    if isinstance(curve, (str, bytes)) or not isinstance(curve, Iterable):
        raise ValueError("mag_ratios must be a list or tensor of ratios, or branch -> list")
    return list(curve)


Ratios = Annotated[Any, BeforeValidator(_ratios)]


@config_class
class MagCacheConfig(CacheConfig):
    """Config of MagCache.

    Args:
        threshold: accumulated error below which a step is skipped; 0 never skips.
        max_skip_steps: at most so many skips in a row (K in the paper).
        retention_ratio: fraction of the steps at the start that always compute.
        num_inference_steps: steps to assume when no scheduler tells; through a pipeline the real number is used.
        mag_ratios: ratios per step (list, tensor, or branch -> list), the result of `calibrate_magnitudes`, or a
            profile, which refuses pipelines that it was not made for (`profile.magnitudes` does not look); ratios
            measured at another number of steps are converted.
        calibrate: compute everything and record the ratios in `stats(target).magnitude_ratios`.
    """

    threshold: float = Field(default=0.06, ge=0.0, allow_inf_nan=False)
    max_skip_steps: int = Field(default=3, ge=1)
    retention_ratio: float = Field(default=0.2, ge=0.0, le=1.0)
    num_inference_steps: int = Field(default=28, ge=1)
    mag_ratios: Ratios = None
    calibrate: bool = False

    @model_validator(mode="after")
    def _needs_ratios(self) -> MagCacheConfig:
        if self.mag_ratios is None and not self.calibrate:
            raise ValueError(
                "mag_ratios is missing: measure them with cachekit.calibrate_magnitudes(pipe, prompts=...), or run "
                "once with calibrate=True and read stats(pipe).magnitude_ratios; FLUX.1 has cachekit.FLUX_MAG_RATIOS"
            )
        return self


class _Listen:
    """Gate of the calibration: computes always."""

    def decide(self, context: GateContext) -> Verdict:
        return Verdict(False, reason=CALIBRATION_REASON)


def _examples() -> dict[str, CacheConfig]:
    return {"": MagCacheConfig(calibrate=True)}


def _made_for(config: MagCacheConfig, target: Any) -> None:
    profile = getattr(config.mag_ratios, "profile", None)
    if profile is not None:
        profile.require(target, "pass mag_ratios=profile.magnitudes to use its ratios nevertheless")


def _with_ratios(threshold: float, sources: Sources) -> dict[str, Any]:
    return {"threshold": threshold, "mag_ratios": sources.magnitudes(), "num_inference_steps": sources.steps}


_TUNABLE = Tunable(
    "threshold",
    "threshold",
    low=0.002,
    high=8.0,
    start=0.06,
    variants={"": {}, "long skips": {"max_skip_steps": 8, "retention_ratio": 0.1}},
    configure=_with_ratios,
)


@strategy("magcache", MagCacheConfig, check=_made_for, examples=_examples, tunable=_TUNABLE)
def magcache(config: MagCacheConfig, denoiser: nn.Module) -> list[Rule]:
    """Magnitude gate, last change of the block stack; or the calibration run."""
    if config.calibrate:
        return [Rule(StackSpec(), _Listen(), Reuse(), Guards(warmup=0), observe=magnitude_ratio)]
    gate = MagnitudeGate(config.mag_ratios, config.threshold, config.num_inference_steps)
    guards = Guards(
        retention=config.retention_ratio, assumed=config.num_inference_steps, max_consecutive=config.max_skip_steps
    )
    return [Rule(StackSpec(), gate, Reuse(), guards, config.storage)]


def magnitude_ratio(previous: Entry, new: Entry, read: Callable[[torch.Tensor], float]) -> float:
    """Mean over tokens of |new residual| / |previous residual| on the latent stream.

    Several segments count by their numbers of tokens. 1.0 where nothing can be compared.
    """
    ratios = []
    for place in new.primary:
        before, after = previous.values.get(place), new.values[place]
        if before is None or before.shape != after.shape:
            continue
        dim = -1 if after.ndim <= 3 else 1
        norm_before = torch.linalg.vector_norm(before.float(), dim=dim)
        norm_after = torch.linalg.vector_norm(after.float(), dim=dim)
        ratios.append((norm_after / norm_before.clamp_min(1e-8)).flatten())
    return read(torch.cat(ratios).mean()) if ratios else 1.0
