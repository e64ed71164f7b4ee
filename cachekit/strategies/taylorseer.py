"""TaylorSeer: between computed steps results are extrapolated instead of reused.

Method: Liu et al., "From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers" (2025). The paper
predicts every attention output; predicting the change of the whole block stack holds two tensors instead of two per
attention, skips all of the blocks, and is the default here.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import nn

from cachekit.engine.history import Storage
from cachekit.engine.rules import Guards, ModulesSpec, Rule, StackSpec
from cachekit.strategies.base import CacheConfig, checked_patterns, config_class, strategy
from cachekit.strategies.gates import IntervalGate
from cachekit.strategies.predictors import Taylor
from cachekit.strategies.sites import attention_site, named_site
from cachekit.strategies.tunable import Tunable


def _patterns(value: Any) -> Any:
    checked_patterns(value or ())
    return value


Patterns = Annotated[list[str] | None, BeforeValidator(_patterns)]


@config_class
class TaylorSeerCacheConfig(CacheConfig):
    """Config of TaylorSeer.

    Args:
        cache_interval: distance between computed steps; 1 never skips.
        disable_cache_before_step: number of steps at the start that always compute.
        disable_cache_after_step: from this step on everything computes; None for never.
        max_order: order of the extrapolation; 0 reuses.
        taylor_factors_dtype: dtype in which results are kept; None keeps them as computed.
        skip_predict_identifiers: regular expressions; modules whose whole path matches return zeros when skipped.
        cache_identifiers: regular expressions; modules whose whole path matches are predicted.
        use_lite_mode: True predicts the block stack, False every attention output; None is False when identifiers
            are given and True otherwise.
    """

    cache_interval: int = Field(default=5, ge=1)
    disable_cache_before_step: int = Field(default=3, ge=0)
    disable_cache_after_step: int | None = Field(default=None, ge=0)
    max_order: int = Field(default=1, ge=0, le=4)
    taylor_factors_dtype: torch.dtype | None = None
    skip_predict_identifiers: Patterns = None
    cache_identifiers: Patterns = None
    use_lite_mode: bool | None = None

    @model_validator(mode="after")
    def _one_site(self) -> TaylorSeerCacheConfig:
        if self.use_lite_mode and (self.skip_predict_identifiers or self.cache_identifiers):
            raise ValueError("use_lite_mode=True predicts the block stack; leave the identifiers out, or set it False")
        return self

    def site(self, denoiser: nn.Module) -> StackSpec | ModulesSpec:
        """Where this config predicts."""
        if self.skip_predict_identifiers or self.cache_identifiers:
            return named_site(denoiser, self.cache_identifiers, self.skip_predict_identifiers)
        return attention_site(denoiser) if self.use_lite_mode is False else StackSpec()


def _from_diffusers(fields: dict[str, Any]) -> dict[str, Any]:
    """diffusers' lite mode overrides identifiers; here the two exclude each other."""
    if fields.get("use_lite_mode"):
        fields = {**fields, "skip_predict_identifiers": None, "cache_identifiers": None}
    return fields


def _examples() -> dict[str, CacheConfig]:
    return {"": TaylorSeerCacheConfig(), "attention": TaylorSeerCacheConfig(use_lite_mode=False)}


_TUNABLE = Tunable(
    "cache_interval", "interval", low=2, variants={"": {}, "short warm-up": {"disable_cache_before_step": 1}}
)


@strategy("taylorseer", TaylorSeerCacheConfig, translate=_from_diffusers, examples=_examples, tunable=_TUNABLE)
def taylorseer(config: TaylorSeerCacheConfig, denoiser: nn.Module) -> list[Rule]:
    """Fixed interval after the warm-up, divided differences."""
    warmup = config.disable_cache_before_step
    return [
        Rule(
            config.site(denoiser),
            IntervalGate(config.cache_interval, anchor=max(warmup - 1, 0)),
            Taylor(config.max_order),
            Guards(warmup=warmup, stop=config.disable_cache_after_step),
            Storage(config.taylor_factors_dtype or config.cache_dtype, config.storage.device),
        )
    ]
