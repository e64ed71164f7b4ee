"""Contract 13: memory is bounded, counted and given back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

import cachekit as ck

from ..conformance.cases import cases
from ..pipelines.tiny import TINY
from ..toys import ALWAYS, ScriptedConfig, Stack, ToyPipeline, bare_loop, latents, of_time, prompt, toy_pipeline

COND, UNCOND = {"encoder_hidden_states": prompt(1)}, {"encoder_hidden_states": prompt(2)}
DELTA = latents().nbytes


def extra_bytes(function: Callable[[], Any]) -> int:
    """Bytes of the storages of all tensors that a call leaves alive."""
    gc.collect()
    gc.freeze()
    function()
    gc.collect()
    made = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    return sum({item.untyped_storage()._cdata: item.untyped_storage().nbytes() for item in made}.values())


BOUNDS: dict[str, Any] = {
    "first_block": (ALWAYS, 2),
    "magcache": (ck.MagCacheConfig(mag_ratios=[1.0] * 6, threshold=0.5, retention_ratio=0.0), 1),
    "taylorseer 0": (ck.TaylorSeerCacheConfig(max_order=0), 1),
    "taylorseer 1": (ck.TaylorSeerCacheConfig(max_order=1), 2),
    "taylorseer 3": (ck.TaylorSeerCacheConfig(max_order=3, disable_cache_before_step=5), 4),
}


@pytest.mark.parametrize(("config", "bound"), BOUNDS.values(), ids=BOUNDS)
def test_bytes_held_are_the_tensors_alive(config: Any, bound: int) -> None:
    model = Stack(4, of_time(torch.cos))
    times = [torch.tensor(float(time)) for time in range(6, 0, -1)]
    with ck.cached(model, config):
        held = extra_bytes(lambda: bare_loop(model, times=times))
        assert held == ck.stats(model).bytes_held
        assert 0 < held <= bound * DELTA
        ck.free(model)
        assert ck.stats(model).bytes_held == 0
        assert extra_bytes(lambda: bare_loop(model, times=times)) == ck.stats(model).bytes_held


@pytest.mark.parametrize(("config", "bound"), BOUNDS.values(), ids=BOUNDS)
def test_per_branch(config: Any, bound: int) -> None:
    model = Stack(4, of_time(torch.cos))
    with ck.cached(model, config):
        bare_loop(model, 6, conditions=[COND, UNCOND])
        assert 0 < ck.stats(model).last.peak_bytes <= 2 * bound * DELTA


@pytest.mark.parametrize(("config", "bound"), BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "SD3Transformer2DModel", "CogVideoXTransformer3DModel"])
@torch.no_grad()
def test_real_denoisers(name: str, config: Any, bound: int) -> None:
    """In deltas: one delta is what the segments return, image and text streams together."""
    case = next(case for case in cases() if case.cls.__name__ == name)
    model = case.build()
    with ck.cached(model, ScriptedConfig(computed=(0,))):
        model(**case.inputs(0))
        delta = ck.stats(model).bytes_held
    with ck.cached(model, config):
        held = 0
        for step, time in enumerate(case.timesteps(6)):
            model(**case.at(case.inputs(0), time, step / 8))
            held = max(held, ck.stats(model).bytes_held)
    assert 0 < held <= bound * delta


@pytest.mark.parametrize(("config", "bound"), BOUNDS.values(), ids=BOUNDS)
@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_peak_while_a_block_runs(config: Any, bound: int) -> None:
    """Room is made before the model computes: old and new results are not held at once beyond the bound."""
    model = Stack(4, of_time(torch.cos))
    peak = 0

    def look(*_: Any) -> None:
        nonlocal peak
        peak = max(peak, ck.stats(model).bytes_held)

    with ck.cached(model, config):
        model.blocks[-1].register_forward_pre_hook(look)
        bare_loop(model, 6)
    assert peak <= max(bound - 1, 1) * DELTA if config is not ALWAYS else peak <= bound * DELTA


def test_given_back_after_the_last_step() -> None:
    pipe = toy_pipeline(change=of_time(torch.cos))
    with ck.cached(pipe, ALWAYS):
        assert extra_bytes(lambda: pipe(8, conditions=[COND, UNCOND])) == sum(
            t.nbytes for t in (pipe.scheduler.timesteps, pipe.scheduler.sigmas)
        )
        assert ck.stats(pipe).bytes_held == 0
        assert ck.stats(pipe).peak_bytes > 0


def test_given_back_after_the_last_step_when_guidance_ended_earlier() -> None:
    """The branch that is not called in the last step is let go as well."""
    pipe = toy_pipeline(change=of_time(torch.cos))
    with ck.cached(pipe, ALWAYS):
        pipe(8, conditions=lambda index: [COND, UNCOND] if index < 5 else [COND])
        assert ck.stats(pipe).bytes_held == 0


def test_given_back_after_the_last_step_of_the_second_denoiser() -> None:
    pipe = ToyPipeline(Stack(4), FlowMatchEulerDiscreteScheduler(), transformer_2=Stack(4))
    with ck.cached(pipe, ALWAYS):
        pipe(8, switch=4, conditions=[COND, UNCOND])
        assert ck.stats(pipe).bytes_held == 0


@pytest.mark.parametrize("name", ["flux", "sd15", "wan-two-experts", "flux-img2img", "z-image"])
def test_given_back_by_real_pipelines(name: str) -> None:
    tiny = TINY[name]
    pipe = tiny.build()
    with ck.cached(pipe, ck.TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1)):
        tiny.call(pipe, steps=6)
        assert ck.stats(pipe).peak_bytes > 0
        assert ck.stats(pipe).bytes_held == 0


@pytest.mark.parametrize("how", ["disable", "free", "next run"])
def test_an_aborted_run_is_given_back(how: str) -> None:
    pipe = toy_pipeline(change=of_time(torch.cos))
    ck.enable_cache(pipe, ALWAYS)

    def abort(_: Any, index: int) -> None:
        if index == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipe(8, x=latents(4), callback=abort)
    handle_stats = ck.stats(pipe)
    assert handle_stats.bytes_held > 0
    if how == "disable":
        ck.disable_cache(pipe)
    elif how == "free":
        ck.free(pipe)
    else:

        def look(_: Any, index: int) -> None:
            assert ck.stats(pipe).bytes_held <= 2 * DELTA

        pipe(8, callback=look)
    assert ck.stats(pipe).bytes_held == 0


def test_disable_lets_go_of_the_tensors_while_a_handle_is_kept() -> None:
    model = Stack(4)
    handle = ck.enable_cache(model, ALWAYS)

    def run() -> None:
        bare_loop(model, 4, conditions=[COND])
        handle.disable()

    assert extra_bytes(run) == 0


@pytest.mark.parametrize("how", ["last step", "free", "disable"])
def test_conditioning_is_not_kept_alive(how: str) -> None:
    """Prompt embeddings and control residuals belong to the pipeline; after the run nobody else may hold them."""
    pipe = toy_pipeline()
    handle = ck.enable_cache(pipe, ALWAYS)
    references = []

    def conditions(index: int) -> list[dict[str, Any]]:
        control = torch.ones(1, 4, 8) * index
        references.append(weakref.ref(control))
        return [{"control": control}]

    if how == "last step":
        pipe(6, conditions=conditions)
    else:

        def abort(_: Any, index: int) -> None:
            if index == 3:
                raise KeyError

        with pytest.raises(KeyError):
            pipe(6, conditions=conditions, callback=abort)
        ck.free(pipe) if how == "free" else handle.disable()
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def test_looking_for_the_pipeline_keeps_none_of_its_locals_alive() -> None:
    """A frame's `f_locals` is a copy that the frame keeps: what the pipeline deletes must be gone all the same."""
    model = Stack(3)
    alive: list[bool] = []

    class Deleting(ToyPipeline):
        @torch.no_grad()
        def __call__(self, steps: int = 4) -> None:  # type: ignore[override]
            self.scheduler.set_timesteps(steps)
            for t in self.scheduler.timesteps:
                large = torch.ones(1, 4, 8)
                reference = weakref.ref(large)
                x = self.transformer(latents(), t.expand(1))[0]
                self.scheduler.step(x, t, latents())
                del large
                alive.append(reference() is not None)

    pipe = Deleting(model, FlowMatchEulerDiscreteScheduler())
    pipe()
    assert not any(alive)
    with ck.cached(pipe, ALWAYS):
        pipe()
    assert not any(alive)


def test_twenty_runs_hold_no_more_than_one() -> None:
    """U65."""
    pipe = toy_pipeline(change=of_time(torch.cos))
    with ck.cached(pipe, ALWAYS):
        pipe()
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(20):
            pipe()
        gc.collect()
        assert len(gc.get_objects()) - before < 200


@pytest.mark.parametrize("site", [None, False], ids=["stack", "attention"])
@pytest.mark.parametrize("name", ["flux", "sd15"])
def test_state_in_another_dtype(name: str, site: bool | None) -> None:
    """Half the bytes, and outputs in the model's own dtype."""
    tiny = TINY[name]
    pipe = tiny.build()
    peaks, outputs = [], []
    for dtype in (None, torch.bfloat16):
        config = ck.TaylorSeerCacheConfig(
            cache_interval=2, disable_cache_before_step=1, max_order=0, cache_dtype=dtype, use_lite_mode=site
        )
        with ck.cached(pipe, config):
            outputs.append(tiny.call(pipe, steps=5, guidance=False))
            peaks.append(ck.stats(pipe).peak_bytes)
    assert peaks[1] <= 0.6 * peaks[0]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_first_block_in_another_dtype(dtype: torch.dtype) -> None:
    model = Stack(4, of_time(torch.cos))
    with ck.cached(model, "first_block", threshold=0.5, cache_dtype=dtype):
        output = bare_loop(model)
        assert {result.dtype for result in output} == {torch.float32}


def test_state_on_another_device() -> None:
    model = Stack(4)
    with ck.cached(model, "first_block", threshold=0.5, cache_device="cpu"):
        bare_loop(model)
