"""TextKV: keys and values of the text stream are projected once per prompt and reused at every step.

In cross-attention the projections of the text depend on the prompt alone, so that doing them again at every step is
wasted; diffusers' `TextKVCacheConfig` does this for one model by hand. Here the projections are found in any model by
following the latents and the timestep through one call. Nothing is predicted: the output does not change by a bit.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator
from torch import nn

from cachekit.engine.rules import GateContext, Guards, Rule, TextSpec, Verdict
from cachekit.strategies.base import CacheConfig, config_class, strategy
from cachekit.strategies.predictors import Reuse


@config_class
class TextKVCacheConfig(CacheConfig):
    """Config of TextKV. There is nothing to set but `cache_device`, which costs a transfer per call.

    `cache_dtype` stays None: another dtype would change the output.
    """

    @model_validator(mode="after")
    def _exact(self) -> Any:
        if self.cache_dtype is not None:
            raise ValueError("TextKV is exact, which another cache_dtype would undo; leave it None")
        return self


class Unconditionally:
    """Reuse whatever the site found to hold."""

    def decide(self, context: GateContext) -> Verdict:
        return Verdict(True, reason="same text")


@strategy("text_kv", TextKVCacheConfig, lossless=True)
def text_kv(config: TextKVCacheConfig, denoiser: nn.Module) -> list[Rule]:
    """Whatever the text site found constant."""
    return [Rule(TextSpec(), Unconditionally(), Reuse(), Guards(warmup=0), config.storage)]
