"""Guidance in two calls a step survives every strategy: what its scale does to the final latents stays."""

from __future__ import annotations

from collections.abc import Iterator

import diffusers
import pytest
import torch
from diffusers import FluxPipeline
from torch import Tensor

import cachekit as ck
from benchmarks.guidance import COSINE, RATIO, agreement, effect
from cachekit import zoo
from cachekit.strategies import find_strategy

from ..shipped import shipped_strategies
from .families import unet
from .tiny import TINY

pytestmark = [pytest.mark.filterwarnings("ignore::cachekit.CacheWarning"), pytest.mark.xdist_group("guidance")]
STEPS = 28
PROMPT = "red heart"
CONFIGS: dict[str, ck.CacheConfig] = {
    "first_block": ck.FirstBlockCacheConfig(threshold=0.1),
    "taylorseer": ck.TaylorSeerCacheConfig(cache_interval=2),
    "taylorseer-attention": ck.TaylorSeerCacheConfig(cache_interval=2, use_lite_mode=False),
    "seacache": ck.SeaCacheConfig(),
    "schedule": ck.ScheduleCacheConfig((0, *range(1, STEPS - 1, 2), STEPS - 1)),
    "pab": ck.PyramidAttentionBroadcastConfig(spatial_attention_block_skip_range=2),
    "fastercache": ck.FasterCacheConfig(),
}
"""On the trained pipeline; its own defaults where a strategy skips at them."""
ELSEWHERE = {"magcache", "deepcache", "text_kv"}
"""Tested below: calibrated first, UNets only, exact."""


def survives(plain: Tensor, cached: Tensor) -> bool:
    cosine, ratio = agreement(plain, cached)
    return cosine >= COSINE and RATIO[0] <= ratio <= RATIO[1]


@pytest.fixture(scope="module")
def pipe() -> FluxPipeline:
    loaded = zoo.load("emoji-flux")
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def plain(pipe: FluxPipeline) -> Tensor:
    return effect(pipe, PROMPT, STEPS, 0)


@pytest.fixture(autouse=True)
def left_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "pipe" in request.fixturenames:
        assert not ck.is_cache_enabled(request.getfixturevalue("pipe"))


def test_every_strategy_is_here() -> None:
    assert {find_strategy(config).name for config in CONFIGS.values()} | ELSEWHERE == set(shipped_strategies())


@pytest.mark.parametrize("name", CONFIGS)
def test_on_the_trained_pipeline(name: str, pipe: FluxPipeline, plain: Tensor) -> None:
    config = CONFIGS[name]
    cached = effect(pipe, PROMPT, STEPS, 0, config)
    assert not torch.equal(cached, plain), "nothing was skipped"
    assert survives(plain, cached), agreement(plain, cached)


def test_magcache_on_the_trained_pipeline(pipe: FluxPipeline, plain: Tensor) -> None:
    call = {"negative_prompt": "", "true_cfg_scale": 3.0, "output_type": "latent"}
    ratios = ck.calibrate_magnitudes(pipe, ["fox"], STEPS, generator=torch.Generator().manual_seed(1), **call)
    cached = effect(pipe, PROMPT, STEPS, 0, ck.MagCacheConfig(mag_ratios=ratios, num_inference_steps=STEPS))
    assert not torch.equal(cached, plain), "nothing was skipped"
    assert survives(plain, cached), agreement(plain, cached)


def test_the_measure_tells(pipe: FluxPipeline, plain: Tensor) -> None:
    """A hook that hands one branch the attention of the other is far outside."""
    config = diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: pipe._current_timestep
    )
    pipe.transformer.enable_cache(config)
    try:
        assert not survives(plain, effect(pipe, PROMPT, STEPS, 0))
    finally:
        pipe.transformer.disable_cache()


@torch.no_grad()
def sampled(model: torch.nn.Module, scale: float) -> Tensor:
    """Twenty DDIM steps of a UNet with two calls each, written by hand."""
    scheduler = diffusers.DDIMScheduler(**unet.NOISE)
    scheduler.set_timesteps(20)
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 4, 8, 8, generator=generator)
    cond, uncond = (torch.randn(1, 7, unet.TEXT_WIDTH, generator=generator) for _ in range(2))
    for timestep in scheduler.timesteps:
        with_prompt, without = (model(latents, timestep, prompt).sample for prompt in (cond, uncond))
        latents = scheduler.step(without + scale * (with_prompt - without), timestep, latents).prev_sample
    return latents.flatten()


@pytest.mark.parametrize("depth", [1, 2])
def test_deepcache_on_a_unet_called_twice(depth: int) -> None:
    model = TINY["sd15"].build().unet
    plain = sampled(model, 5.0) - sampled(model, 2.0)
    with ck.cached(model, ck.DeepCacheConfig(branch_depth=depth)) as handle:
        cached = sampled(model, 5.0) - sampled(model, 2.0)
        assert handle.stats().last.branches == ("cond", "uncond")
        assert handle.stats().reused == 26  # of 40 calls
    assert survives(plain, cached), agreement(plain, cached)


def test_text_kv_leaves_every_bit() -> None:
    tiny, pipe = TINY["wan"], TINY["wan"].build()
    scales = (2.0, tiny.guided["guidance_scale"])
    plain = [tiny.call(pipe, guidance_scale=scale) for scale in scales]
    with ck.cached(pipe, "text_kv") as handle:
        cached = [tiny.call(pipe, guidance_scale=scale) for scale in scales]
        assert handle.stats().last.projections_reused > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, cached, strict=True))
