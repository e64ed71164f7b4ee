"""DeepCache: a UNet's deep part is computed on some steps and its last result reused on the others.

Method: Ma, Fang, Wang, "DeepCache: Accelerating Diffusion Models for Free" (2023). Deep features change little between
neighbouring steps, while the outermost blocks, which run in every step, follow the latents. The computed steps are
evenly spaced (1:N in the paper), or dense around one step and sparser towards both ends. Nothing is read back from the
device and nothing looks at the content.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from pydantic import Field, model_validator
from torch import nn

from cachekit.engine.discovery import find_unet, unwrap
from cachekit.engine.rules import Gate, GateContext, Guards, Rule, StackSpec, Verdict
from cachekit.errors import UnsupportedModelError
from cachekit.strategies.base import CacheConfig, config_class, strategy
from cachekit.strategies.gates import IntervalGate
from cachekit.strategies.predictors import Reuse
from cachekit.strategies.tunable import Tunable

_POWER_STEP = 0.02


@config_class
class DeepCacheConfig(CacheConfig):
    """Config of DeepCache.

    Args:
        cache_interval: mean distance between computed steps (N of the paper's 1:N); 1 never skips.
        branch_depth: number of outermost blocks of each half that run in every step, from 1.
        centre: the step around which computed steps are dense; None spaces them evenly. A run that is shorter is
            centred on its last step.
        power: how much denser, from 1 (evenly spaced); only used with `centre`. Lowered where the computed steps
            would fall onto each other.
        disable_cache_before_step: number of steps at the start that always compute.
        disable_cache_after_step: from this step on everything computes; None for never.
        num_inference_steps: number of steps to assume with `centre` when no scheduler tells; through a pipeline the
            real number is used.
    """

    cache_interval: int = Field(default=3, ge=1)
    branch_depth: int = Field(default=1, ge=1)
    centre: int | None = Field(default=None, ge=0)
    power: float = Field(default=1.4, ge=1.0, le=10.0)
    disable_cache_before_step: int = Field(default=1, ge=0)
    disable_cache_after_step: int | None = Field(default=None, ge=0)
    num_inference_steps: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _steps_serve_the_centre(self) -> DeepCacheConfig:
        if self.num_inference_steps is not None and self.centre is None:
            raise ValueError("num_inference_steps is only used with centre; set centre, or leave it out")
        return self

    @property
    def gate(self) -> Gate:
        """Which steps compute, counted from the last one of the warm-up."""
        anchor = max(self.disable_cache_before_step - 1, 0)
        if self.centre is None:
            return IntervalGate(self.cache_interval, anchor)
        return CentredGate(self.cache_interval, anchor, self.centre, self.power, self.num_inference_steps)


@dataclass(frozen=True)
class CentredGate:
    """Compute the steps of :func:`centred_steps`, which take the place of every `interval`-th step after `anchor`."""

    interval: int
    anchor: int
    centre: int
    power: float
    steps: int | None

    def decide(self, context: GateContext) -> Verdict:
        total = context.now.steps or self.steps
        if total is None:
            return Verdict(False, reason="the number of steps is unknown; set num_inference_steps")
        left = max(total - self.anchor, 1)
        chosen = centred_steps(left, math.ceil(left / self.interval), self.centre - self.anchor, self.power)
        computes = context.now.step - self.anchor in chosen
        return Verdict(not computes, reason="scheduled step" if computes else "between scheduled steps")


@lru_cache(maxsize=256)
def centred_steps(steps: int, computed: int, centre: int, power: float) -> frozenset[int]:
    """`computed` of `steps` steps, the first among them, dense around `centre`.

    With c the centre and p the power they are the integers nearest to c + sign(x) |x|^p for `computed` evenly spaced x
    from -c^(1/p) up to, but without, (steps - c)^(1/p) (section 3.3 of the paper; there the end is included). Where
    two of them coincide p is lowered; at p = 1 they are evenly spaced.
    """
    middle = min(max(centre, 0), steps - 1)
    while True:
        start, end = -(middle ** (1 / power)), (steps - middle) ** (1 / power)
        points = [start + (end - start) * i / computed for i in range(computed)]
        chosen = frozenset(math.floor(middle + math.copysign(abs(x) ** power, x) + 0.5) for x in points)
        if len(chosen) == computed or power == 1.0:
            return chosen
        power = max(power - _POWER_STEP, 1.0)


_TUNABLE = Tunable("cache_interval", "interval", low=2)


@strategy("deepcache", DeepCacheConfig, tunable=_TUNABLE)
def deepcache(config: DeepCacheConfig, denoiser: nn.Module) -> list[Rule]:
    """Fixed steps, last result of the deep part."""
    guards = Guards(warmup=config.disable_cache_before_step, stop=config.disable_cache_after_step)
    return [Rule(_deep_part(config.branch_depth, denoiser), config.gate, Reuse(), guards, config.storage)]


def _deep_part(depth: int, denoiser: nn.Module) -> StackSpec:
    core = unwrap(denoiser)
    name = type(core).__name__
    parts = find_unet(core)
    if parts is None:
        raise UnsupportedModelError(
            f"{name} is no UNet with down_blocks and up_blocks of equal number, so it has no deep part; use "
            f"'first_block', 'taylorseer' or 'magcache', which skip its blocks instead"
        )
    most = len(parts.down.blocks) - (parts.middle is None)
    if depth > most:
        raise UnsupportedModelError(
            f"DeepCacheConfig.branch_depth: {name} has {len(parts.down.blocks)} down blocks, so branch_depth can be 1 "
            f"to {most}, got {depth}"
        )
    return StackSpec(depth=depth)
