"""Contract 1: nothing to skip = nothing changed, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cachekit as ck

from ..pipelines.tiny import TINY
from ..toys import Stack, bare_loop, of_time, pattern, prompt, toy_pipeline

NEVER: dict[str, Any] = {
    "first_block": ck.FirstBlockCacheConfig(threshold=0.0),
    "magcache": ck.MagCacheConfig(threshold=0.0, mag_ratios=[1.0] * 8),
    "magcache calibration": ck.MagCacheConfig(calibrate=True),
    "taylorseer": ck.TaylorSeerCacheConfig(cache_interval=1),
    "taylorseer late": ck.TaylorSeerCacheConfig(disable_cache_before_step=100),
    "taylorseer stopped": ck.TaylorSeerCacheConfig(disable_cache_after_step=0),
}


@pytest.mark.parametrize("config", NEVER.values(), ids=NEVER)
def test_bare_denoiser(config: Any) -> None:
    model = Stack(4, of_time(torch.sin))
    conditions = [{"encoder_hidden_states": prompt(1)}, {"encoder_hidden_states": prompt(2)}]
    base = bare_loop(model, conditions=conditions)
    before = model.calls
    with ck.cached(model, config):
        output = bare_loop(model, conditions=conditions)
    assert all(torch.equal(a, b) for a, b in zip(base, output, strict=True))
    assert model.calls == [2 * count for count in before]


@pytest.mark.parametrize("config", NEVER.values(), ids=NEVER)
@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_pipeline(config: Any) -> None:
    pipe = toy_pipeline(change=of_time(torch.cos))
    base = pipe()
    with ck.cached(pipe, config):
        assert torch.equal(pipe(), base)
        assert pattern(pipe) == "#" * 8


@pytest.mark.parametrize("name", ["flux", "sd15", "latte", "hunyuan-video"])
@pytest.mark.parametrize("config", ["first_block", "taylorseer"])
@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_real_pipelines(name: str, config: str) -> None:
    tiny = TINY[name]
    pipe = tiny.build()
    base = tiny.call(pipe, steps=3)
    with ck.cached(pipe, NEVER[config]):
        assert torch.equal(tiny.call(pipe, steps=3), base)
    assert torch.equal(tiny.call(pipe, steps=3), base)
