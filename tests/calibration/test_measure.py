"""What is measured: fidelity, calls, floating-point operations; on tiny real pipelines."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import cachekit as ck
from cachekit.calibration.measure import IDENTICAL, Bench, Measured, Setting
from cachekit.calibration.work import counted
from tests.pipelines.tiny import TINY

from .tuning import PROMPTS, tiny_flux

STEPS = 6


@pytest.fixture(scope="module")
def bench() -> Bench:
    pipe, arguments = tiny_flux()
    return Bench(pipe, PROMPTS[:2], STEPS, 0, arguments)


def measure(bench: Bench, config: Any, steps: int = STEPS) -> Measured:
    (found,) = bench.measure(Setting("x", 0, "x", steps, config))
    return found


def test_the_uncached_run(bench: Bench) -> None:
    assert bench.calls == 2 * STEPS, "two guidance branches"
    assert bench.scheduler_steps == STEPS
    assert bench.pictures
    assert bench.repeats
    assert not ck.is_cache_enabled(bench.pipe)
    assert not bench.pipe.transformer._forward_hooks
    assert not bench.pipe.transformer._forward_pre_hooks


def test_nothing_skipped_is_identical_and_costs_the_same(bench: Bench) -> None:
    found = measure(bench, ck.FirstBlockCacheConfig(0.0))
    assert (found.mean, found.worst) == (IDENTICAL, IDENTICAL)
    assert (found.calls, found.computed, found.skips) == (2 * STEPS, 2 * STEPS, False)
    assert found.speedup() == found.speedup("calls") == 1.0
    assert "drift >= threshold" in found.reasons


def test_the_whole_denoiser_costs_nothing_and_a_probe_costs_a_block(bench: Bench) -> None:
    schedule = measure(bench, ck.ScheduleCacheConfig((0, 2, 4)))
    assert schedule.reuse_cost == 0.0
    assert schedule.speedup() == schedule.speedup("calls") == 2.0
    probe = measure(bench, ck.FirstBlockCacheConfig(1e9))
    assert probe.computed == 2
    assert 0.02 < probe.reuse_cost < 0.5, "the first block, what is before and what is after the blocks"
    assert probe.speedup() < probe.speedup("calls") == STEPS
    attention = measure(bench, ck.PyramidAttentionBroadcastConfig(2, spatial_attention_timestep_skip_range=(-1, 1001)))
    assert 0.3 < attention.reuse_cost < 1.0, "everything but the attention runs"


def test_fewer_steps_are_counted(bench: Bench) -> None:
    found = measure(bench, None, steps=3)
    assert found.speedup() == found.speedup("calls") == 2.0
    assert 0 < found.mean < IDENTICAL


def test_fidelity_is_that_of_pictures(bench: Bench) -> None:
    config = ck.ScheduleCacheConfig((0, 3))
    found = measure(bench, config)
    tiny = TINY["flux"]
    for index, prompt in enumerate(PROMPTS[:2]):
        call = {"steps": STEPS, "prompt": prompt, "seed": index, "output_type": "pt", "negative_prompt": ""}
        base = tiny.call(bench.pipe, **call)
        with ck.cached(bench.pipe, config):
            drawn = tiny.call(bench.pipe, **call)
        assert found.pictures[index].psnr == pytest.approx(ck.metrics.psnr(base, drawn), abs=1e-3)


def test_latents_are_compared_with_their_own_range() -> None:
    pipe, arguments = tiny_flux()
    bench = Bench(pipe, PROMPTS[:1], 4, 0, arguments | {"output_type": "latent"})
    assert not bench.pictures
    found = measure(bench, ck.ScheduleCacheConfig((0, 2)), steps=4)
    tiny = TINY["flux"]
    call: dict[str, Any] = {"steps": 4, "prompt": PROMPTS[0], "negative_prompt": ""}
    base = tiny.call(pipe, **call)
    with ck.cached(pipe, ck.ScheduleCacheConfig((0, 2))):
        drawn = tiny.call(pipe, **call)
    error = ((base - drawn) ** 2).mean() / (base.max() - base.min()) ** 2
    assert found.mean == pytest.approx(-10 * math.log10(error), abs=1e-3)


def test_nan_counts_as_no_likeness(bench: Bench) -> None:
    kept = bench._uncached[0]
    assert bench._psnr(0, torch.full_like(kept, math.nan)) == 0.0
    assert bench._psnr(0, kept) == IDENTICAL
    with pytest.raises(ValueError, match="instead of"):
        bench._psnr(0, kept[..., :-1])


def test_counting_sees_matrix_products_convolutions_and_attention() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 16)
            self.conv = torch.nn.Conv1d(3, 5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.conv(torch.zeros(1, 3, 7))
            y = self.linear(x)[None, None]
            return torch.nn.functional.scaled_dot_product_attention(y, y, y)

    model = Model()
    expected = 2 * 4 * 8 * 16 + 2 * 3 * 5 * 7 + 2 * 2 * 4 * 4 * 16
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), counted([model]) as work:
            torch.zeros(9, 9) @ torch.zeros(9, 9)  # outside of the model
            model(torch.zeros(4, 8))
            model(torch.zeros(4, 8))
        assert (work.calls, work.flops) == (2, 2 * expected)
    with pytest.raises(RuntimeError), counted([model]) as work:
        model(torch.zeros(4, 7))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"prompts": []}, ValueError, "prompts is empty"),
        ({"steps": 0}, ValueError, "num_inference_steps"),
        ({"generator": None}, ValueError, "generator cannot be passed on"),
        ({"output_type": "pil"}, ValueError, "8-bit"),
        ({"prompts": [{"prompt": "a", "generator": 1}]}, ValueError, "generator cannot be passed on"),
    ],
    ids=str,
)
def test_bad_input(bench: Bench, change: dict[str, Any], error: type[Exception], message: str) -> None:
    prompts, steps = change.pop("prompts", PROMPTS[:1]), change.pop("steps", 2)
    with pytest.raises(error, match=message):
        Bench(bench.pipe, prompts, steps, 0, change)


def test_a_trial_that_skips_nothing_warns_nobody(bench: Bench) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ck.CacheWarning)
        assert not measure(bench, ck.TaylorSeerCacheConfig(cache_interval=1)).skips
        measure(bench, ck.TaylorSeerCacheConfig(cache_interval=2))


def test_a_prompt_can_be_a_dict(bench: Bench) -> None:
    _, arguments = tiny_flux()
    other = Bench(bench.pipe, [{"prompt": PROMPTS[0]}], STEPS, 0, arguments)
    assert torch.equal(other._uncached[0], bench._uncached[0])


def test_a_pipeline_without_prompts(bench: Bench) -> None:
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    pipe = DDPMPipeline(unet.eval(), DDPMScheduler())
    pipe.set_progress_bar_config(disable=True)
    found = ck.tune(pipe, [{}], strategy="deepcache", speedup=1.3, num_inference_steps=4, evaluations=2, progress=False)
    assert found.best is not None
    assert found.about["compares"] == "pictures"
    with pytest.raises(TypeError, match="takes no prompt; pass dicts"):
        Bench(pipe, ["a cat"], 4, 0, {})


def test_an_enabled_cache_is_refused(bench: Bench) -> None:
    with ck.cached(bench.pipe, "text_kv"), pytest.raises(ck.CacheConflictError, match="disable_cache"):
        Bench(bench.pipe, PROMPTS[:1], 2, 0, {})
    with pytest.raises(TypeError, match="whole pipeline"):
        Bench(bench.pipe.transformer, PROMPTS[:1], 2, 0, {})


def test_a_failing_run_leaves_nothing(bench: Bench) -> None:
    def stop(*args: Any) -> Any:
        raise KeyboardInterrupt

    _, arguments = tiny_flux()
    with pytest.raises(KeyboardInterrupt):
        Bench(bench.pipe, PROMPTS[:1], 4, 0, arguments | {"callback_on_step_end": stop})
    assert not ck.is_cache_enabled(bench.pipe)
    assert not bench.pipe.transformer._forward_hooks
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("name", ["sd15", "wan-two-experts"])
def test_other_pipelines(name: str) -> None:
    """A UNet with guidance in the batch and more calls than steps; a video model with two denoisers."""
    tiny = TINY[name]
    arguments = {**tiny.sizes[0], **tiny.common, **tiny.guided, "negative_prompt": "blurry"}
    bench = Bench(tiny.build(), PROMPTS[:1], 5, 0, arguments)
    assert bench.pictures
    assert bench.calls == (6 if name == "sd15" else 10)
    assert bench.scheduler_steps == (6 if name == "sd15" else 5)
    found = measure(bench, ck.FirstBlockCacheConfig(1e9), steps=5)
    assert found.skips
    assert found.speedup("calls") > found.speedup() > 1.2
    assert np.isfinite(found.mean)
