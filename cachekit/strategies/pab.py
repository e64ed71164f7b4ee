"""Pyramid Attention Broadcast: attention outputs are handed on to the next steps, each type at its own rate.

Method: Zhao et al., "Real-Time Video Generation with Pyramid Attention Broadcast" (2024). In the middle of a run the
attention outputs of neighbouring steps differ little: cross attention least, then temporal, then spatial. With n the
skip range of a type and s its last computed step, step t is reused when t - s < n and its noise level lies inside the
window. Blocks run, so the model still reacts to the latents; what is saved is attention. Each guidance branch is handed
its own results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
from pydantic import model_validator
from torch import nn

from cachekit.engine.attention import KINDS, attention_kinds
from cachekit.engine.rules import Guards, ModulesSpec, Rule
from cachekit.strategies.attention_ranges import (
    AttentionConfig,
    Identifiers,
    SkipRange,
    Window,
    attention_modules,
    unlisted,
)
from cachekit.strategies.base import CacheConfig, config_class, strategy
from cachekit.strategies.gates import WindowGate
from cachekit.strategies.predictors import Reuse
from cachekit.strategies.tunable import Sources, Tunable


@config_class
class PyramidAttentionBroadcastConfig(AttentionConfig):
    """Config of Pyramid Attention Broadcast. At least one skip range has to be set; types without one compute.

    Args:
        spatial_attention_block_skip_range: compute attention over the own stream (joint image and text included) every
            n-th step inside the window; 1 never skips, 2 is usual.
        temporal_attention_block_skip_range: the same for attention along the frames; 3 or 4.
        cross_attention_block_skip_range: the same for attention to another stream, such as the prompt; 5 or 6.
        spatial_attention_timestep_skip_range: the window (start, end): steps whose noise level lies between the two may
            reuse. The scale goes from 0 (clean) to 1000 (noise); timesteps and sigmas that count from 0 to 1, or that
            rise during sampling, are converted.
        temporal_attention_timestep_skip_range: the same for temporal attention.
        cross_attention_timestep_skip_range: the same for cross attention.
        spatial_attention_block_identifiers: regular expressions searched in the paths of attention modules; those found
            are this type. None sorts modules by what they are fed.
        temporal_attention_block_identifiers: the same for temporal attention.
        cross_attention_block_identifiers: the same for cross attention.
        current_timestep_callback: returns the current noise level, compared with the windows as it is. Not needed: the
            engine knows it.
    """

    spatial_attention_block_skip_range: SkipRange = None
    temporal_attention_block_skip_range: SkipRange = None
    cross_attention_block_skip_range: SkipRange = None
    spatial_attention_timestep_skip_range: Window = (100, 800)
    temporal_attention_timestep_skip_range: Window = (100, 800)
    cross_attention_timestep_skip_range: Window = (100, 800)
    spatial_attention_block_identifiers: Identifiers = None
    temporal_attention_block_identifiers: Identifiers = None
    cross_attention_block_identifiers: Identifiers = None
    current_timestep_callback: Callable[[], Any] | None = None

    @model_validator(mode="after")
    def _needs_a_range(self) -> PyramidAttentionBroadcastConfig:
        if not self.kinds:
            fields = ", ".join(f"{kind}_attention_block_skip_range" for kind in KINDS)
            raise ValueError(f"nothing would be reused: set at least one of {fields} (2 for every second step)")
        return self


def _examples() -> dict[str, CacheConfig]:
    return {
        "": PyramidAttentionBroadcastConfig(spatial_attention_block_skip_range=2),
        "temporal": PyramidAttentionBroadcastConfig(temporal_attention_block_skip_range=4),
        "cross": PyramidAttentionBroadcastConfig(cross_attention_block_skip_range=6),
    }


_PACE = {"spatial": 1, "temporal": 2, "cross": 3}
"""Skip ranges of the types relative to each other, as the paper has them (2, 4 and 6)."""


def _ranges(interval: int, sources: Sources) -> dict[str, Any]:
    found = [attention_kinds(denoiser) for denoiser in sources.denoisers.values()]
    kinds = [kind for kind in KINDS if all(kind in known for known in found)]
    return {f"{kind}_attention_block_skip_range": interval * _PACE[kind] for kind in kinds or KINDS[:1]}


_TUNABLE = Tunable(
    "block_skip_range",
    "interval",
    low=2,
    variants={"": {}, "all levels": {f"{kind}_attention_timestep_skip_range": (-1.0, 1001.0) for kind in KINDS}},
    configure=_ranges,
)


@strategy(
    "pab",
    PyramidAttentionBroadcastConfig,
    translate=partial(unlisted, diffusers.PyramidAttentionBroadcastConfig),
    examples=_examples,
    tunable=_TUNABLE,
)
def pab(config: PyramidAttentionBroadcastConfig, denoiser: nn.Module) -> list[Rule]:
    """One rule for each type of attention: fixed interval inside the window, last output."""
    return [
        Rule(
            ModulesSpec(modules),
            WindowGate(
                config.of(kind, "block_skip_range"),
                config.of(kind, "timestep_skip_range"),
                config.current_timestep_callback,
            ),
            Reuse(),
            Guards(),
            config.storage,
            name=f"{kind} attention",
        )
        for kind, modules in attention_modules(config, denoiser).items()
    ]
