"""Contract 3: runs do not leak, however the last one ended and whatever ran in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import EulerDiscreteScheduler

import cachekit as ck

from ..pipelines.tiny import TINY
from ..toys import Stack, ToyPipeline, bare_loop, latents, pattern, prompt, toy_pipeline

CONFIGS = {
    "first_block": ck.FirstBlockCacheConfig(threshold=0.3),
    "magcache": ck.MagCacheConfig(threshold=0.2, mag_ratios=[1.02] * 8, retention_ratio=0.2),
    "taylorseer": ck.TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=2),
}


class AbortError(Exception):
    pass


def moving(scheduler: Any = None) -> ToyPipeline:
    return toy_pipeline(change=lambda x, t: 0.25 * x + torch.cos(t * 3), scheduler=scheduler)


def abort_in_callback(error: type[BaseException]) -> Callable[[ToyPipeline], None]:
    def run(pipe: ToyPipeline) -> None:
        def callback(_: ToyPipeline, index: int) -> None:
            if index == 4:
                raise error

        with pytest.raises(error):
            pipe(callback=callback)

    return run


def abort_in_block(pipe: ToyPipeline) -> None:
    block = pipe.transformer.blocks[0]
    count = block.calls

    def fail(module: Any, args: Any) -> None:
        if module.calls >= count + 2:
            raise AbortError

    handle = block.register_forward_pre_hook(fail)
    with pytest.raises(AbortError):
        pipe()
    handle.remove()


def abort_in_the_last_block(pipe: ToyPipeline) -> None:
    handle = pipe.transformer.blocks[-1].register_forward_hook(lambda *_: (_ for _ in ()).throw(AbortError()))
    with pytest.raises(AbortError):
        pipe()
    handle.remove()


def interrupt(pipe: ToyPipeline) -> None:
    pipe(callback=lambda pipe, index: setattr(pipe, "_interrupt", index >= 3))


def other_dtype(pipe: ToyPipeline) -> None:
    pipe.transformer.to(torch.float64)
    pipe(x=latents(dtype=torch.float64))
    pipe.transformer.to(torch.float32)


BETWEEN: dict[str, Callable[[ToyPipeline], Any]] = {
    "nothing": lambda pipe: None,
    "exception in a callback": abort_in_callback(AbortError),
    "KeyboardInterrupt in a callback": abort_in_callback(KeyboardInterrupt),
    "exception in a block": abort_in_block,
    "exception in the last block": abort_in_the_last_block,
    "pipe._interrupt": interrupt,
    "other prompt": lambda pipe: pipe(conditions=[{"encoder_hidden_states": prompt(9)}]),
    "guidance": lambda pipe: pipe(
        conditions=[{"encoder_hidden_states": prompt(1)}, {"encoder_hidden_states": prompt(2)}]
    ),
    "batch": lambda pipe: pipe(x=latents(3)),
    "size": lambda pipe: pipe(x=latents(tokens=7)),
    "dtype": other_dtype,
    "more steps": lambda pipe: pipe(13),
    "fewer steps": lambda pipe: pipe(3),
    "one step": lambda pipe: pipe(1),
    "image to image": lambda pipe: pipe(begin=4),
    "bare loop": lambda pipe: bare_loop(pipe.transformer, 5),
    "free": lambda pipe: ck.free(pipe),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_equal_runs_are_equal(between: Callable[[ToyPipeline], Any], config: Any) -> None:
    pipe = moving()
    base = pipe()
    with ck.cached(pipe, config):
        first, steps = pipe(), pattern(pipe)
        assert "." in steps
        assert not torch.equal(first, base)
        between(pipe)
        assert torch.equal(pipe(), first)
        assert pattern(pipe) == steps
    assert torch.equal(pipe(), base)


@pytest.mark.parametrize("times", [range(8, 0, -1), range(1, 9)], ids=["falling", "rising"])
@pytest.mark.parametrize("stop", [1, 2, 5])
def test_bare_loop_aborted_by_an_exception_in_a_block(times: range, stop: int) -> None:
    model = Stack(4, lambda x, t: 0.25 * x + torch.cos(t))
    moments = [torch.tensor(float(time)) for time in times]
    with ck.cached(model, CONFIGS["first_block"]):
        first = bare_loop(model, times=moments)
        steps = pattern(model)
        calls = 0

        def fail(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == stop:
                raise AbortError

        handle = model.blocks[0].register_forward_pre_hook(fail)
        with pytest.raises(AbortError):
            bare_loop(model, times=moments)
        handle.remove()
        again = bare_loop(model, times=moments)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert pattern(model) == steps


def test_the_scheduler_is_replaced_between_runs() -> None:
    pipe = moving()
    with ck.cached(pipe, CONFIGS["taylorseer"]):
        first = pipe()
        old, pipe.scheduler = pipe.scheduler, EulerDiscreteScheduler()
        pipe(5)
        assert ck.stats(pipe).last.steps == 5
        assert [decision.step for decision in ck.stats(pipe).last.decisions] == list(range(5))
        pipe.scheduler = old
        assert torch.equal(pipe(), first)


@pytest.mark.parametrize("name", ["flux", "sd15", "wan-two-experts", "latte"])
@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_real_pipelines(name: str) -> None:
    tiny = TINY[name]
    pipe = tiny.build()
    base = tiny.call(pipe, steps=5)

    def abort(_: Any, index: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
        if index == 2:
            raise AbortError
        return values

    with ck.cached(pipe, ck.TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=1)):
        first, steps = tiny.call(pipe, steps=5), pattern(pipe)
        assert "." in steps
        assert not torch.equal(first, base)
        with pytest.raises(AbortError):
            tiny.call(pipe, steps=5, callback=abort)
        tiny.call(pipe, steps=3, prompt="a red car", size=1, guidance=False)
        assert torch.equal(tiny.call(pipe, steps=5), first)
        assert pattern(pipe) == steps
    assert torch.equal(tiny.call(pipe, steps=5), base)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_inference_mode_and_back(config: Any) -> None:
    """Inference tensors have no version and may not be written to afterwards."""
    pipe = moving()
    conditions = [{"encoder_hidden_states": prompt(1)}, {"encoder_hidden_states": prompt(2)}]
    with ck.cached(pipe, config):
        first, steps = pipe(conditions=conditions), pattern(pipe)
        assert "." in steps
        with torch.inference_mode():
            inside = [{"encoder_hidden_states": prompt(1)}, {"encoder_hidden_states": prompt(2)}]
            assert torch.equal(pipe(conditions=inside), first)
            assert pattern(pipe) == steps
            with pytest.raises(AbortError):
                pipe(conditions=inside, callback=lambda *_: (_ for _ in ()).throw(AbortError()))
        assert torch.equal(pipe(conditions=conditions), first)
        assert torch.equal(pipe(conditions=inside), first)
