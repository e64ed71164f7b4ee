"""One picture: a prompt, a number of steps, a seed, and a cache or none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import cachekit

GUIDANCE: dict[str, Any] = {"negative_prompt": "", "true_cfg_scale": 3.0}
"""Classifier-free guidance with an empty negative prompt: two denoiser calls a step."""


@contextlib.contextmanager
def caching(pipe: Any, config: cachekit.CacheConfig | None) -> Iterator[None]:
    """`pipe` with this cache; as it is for None."""
    if config is None:
        yield
        return
    with cachekit.cached(pipe, config, progress=False):
        yield


def draw(pipe: Any, prompt: str, steps: int, seed: int, output_type: str = "pt") -> torch.Tensor:
    """One picture, (3, H, W) on the CPU; whatever the pipeline calls latents for `output_type="latent"`."""
    generator = torch.Generator().manual_seed(seed)
    output = pipe(prompt, num_inference_steps=steps, generator=generator, output_type=output_type, **GUIDANCE)
    image: torch.Tensor = output.images[0].float().cpu()
    return image
