"""What the demo compares: a name, what a reader should know about it, and a cache config or another step count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import cachekit

GUIDANCE: dict[str, Any] = {"negative_prompt": "", "true_cfg_scale": 3.0}
"""Classifier-free guidance with an empty negative prompt: two denoiser calls a step."""


@dataclass(frozen=True)
class Method:
    """One row of the demo.

    Attributes:
        name: what the table calls it.
        settings: its settings in a few words.
        config: the cache to enable; None for none.
        steps: number of steps.
    """

    name: str
    settings: str
    steps: int
    config: cachekit.CacheConfig | None = None


def uncached(steps: int) -> Method:
    """The reference."""
    return Method("uncached", "", steps)


def fewer_steps(steps: int) -> Method:
    """The control: no cache, simply fewer steps."""
    return Method("fewer steps", "control", steps)


def cache_methods(pipe: Any, calibration: Sequence[str], steps: int, seed: int) -> list[Method]:
    """The caches, at settings that compute about the same number of steps on the embedded pipeline.

    Args:
        pipe: the pipeline, without a cache.
        calibration: prompts on which MagCache is calibrated here, not those that are drawn.
        steps: number of steps.
        seed: seed of the calibration's noise.
    """
    drift = cachekit.FirstBlockCacheConfig(threshold=0.1)
    ratios = cachekit.calibrate_magnitudes(
        pipe,
        prompts=list(calibration),
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
        **GUIDANCE,
    )
    magnitude = cachekit.MagCacheConfig(mag_ratios=ratios, num_inference_steps=steps)
    seer = cachekit.TaylorSeerCacheConfig(cache_interval=2, max_order=1)
    return [
        Method("FirstBlock", f"threshold {drift.threshold:g}", steps, drift),
        Method("MagCache", f"threshold {magnitude.threshold:g}", steps, magnitude),
        Method("TaylorSeer", f"{seer.cache_interval} steps, order {seer.max_order}", steps, seer),
    ]
