"""First Block Cache: the first block's change from step to step decides whether the other blocks run.

Method: ParaAttention's First Block Cache (Cheng, 2024), after TeaCache (Liu et al., 2024). Use it first: it needs no
calibration and follows the content. It always pays for one block and for one value read back per call.
"""

from __future__ import annotations

from pydantic import Field
from torch import nn

from cachekit.engine.rules import Guards, Rule, StackSpec
from cachekit.strategies.base import CacheConfig, config_class, strategy
from cachekit.strategies.gates import DriftGate
from cachekit.strategies.predictors import Reuse
from cachekit.strategies.tunable import Tunable


@config_class
class FirstBlockCacheConfig(CacheConfig):
    """Config of First Block Cache.

    Args:
        threshold: relative drift of the first block's residual below which the rest is reused; 0 never reuses, 0.05
            is careful, 0.2 is faster and of lower quality.
        per_sample: the samples of a batch decide separately; those that need computing are computed, the others
            reuse, and each comes out as it would alone (up to rounding). Not a field of diffusers' config.
    """

    threshold: float = Field(default=0.05, ge=0.0, allow_inf_nan=False)
    per_sample: bool = Field(default=False, kw_only=True)


_TUNABLE = Tunable("threshold", "threshold", low=0.002, high=4.0, start=0.1)


@strategy("first_block", FirstBlockCacheConfig, tunable=_TUNABLE)
def first_block(config: FirstBlockCacheConfig, denoiser: nn.Module) -> list[Rule]:
    """Drift gate on the first block, last change of the other blocks."""
    return [
        Rule(
            StackSpec(probe=True),
            DriftGate(config.threshold),
            Reuse(),
            Guards(),
            config.storage,
            per_sample=config.per_sample,
        )
    ]
