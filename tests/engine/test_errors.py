"""Contract 15: errors name the cure, and nothing is half-enabled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import nn

import cachekit as ck
from cachekit.engine.denoiser import DenoiserEngine

from ..pipelines.tiny import TINY
from ..toys import ALWAYS, Stack, ToyPipeline, bare_loop, toy_pipeline
from .test_disable_restores import traces


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.lin(hidden_states),)


def test_unsupported_module() -> None:
    model = NoBlocks()
    before = traces(model)
    with pytest.raises(ck.UnsupportedModelError, match="ModuleList"):
        ck.enable_cache(model, ALWAYS)
    assert traces(model) == before
    assert not ck.is_cache_enabled(model)


def test_a_second_denoiser_that_is_unsupported_rolls_the_first_one_back() -> None:
    pipe = ToyPipeline(Stack(4), FlowMatchEulerDiscreteScheduler(), transformer_2=NoBlocks())
    before = traces(pipe.transformer)
    observer = DiffusionPipeline.__dict__["progress_bar"]
    with pytest.raises(ck.UnsupportedModelError):
        ck.enable_cache(pipe, ALWAYS)
    assert traces(pipe.transformer) == before
    assert not ck.is_cache_enabled(pipe)
    assert DiffusionPipeline.__dict__["progress_bar"] is observer
    pipe()
    pipe.transformer_2 = None
    with ck.cached(pipe, ALWAYS):
        pipe()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_while_hooking_rolls_back(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = ToyPipeline(Stack(4), FlowMatchEulerDiscreteScheduler(), transformer_2=Stack(4))
    before = [traces(pipe.transformer), traces(pipe.transformer_2)]
    original, seen = DenoiserEngine.__init__, []

    def fail_at_the_second(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(self)
        if len(seen) == 2:
            raise error
        original(self, *args, **kwargs)

    monkeypatch.setattr(DenoiserEngine, "__init__", fail_at_the_second)
    with pytest.raises(error):
        ck.enable_cache(pipe, ALWAYS)
    assert [traces(pipe.transformer), traces(pipe.transformer_2)] == before
    assert not ck.is_cache_enabled(pipe)


def test_unknown_field() -> None:
    for wrong in (
        lambda: ck.enable_cache(Stack(2), "first_block", treshold=0.1),
        lambda: ck.enable_cache(Stack(2), ck.FirstBlockCacheConfig(), treshold=0.1),
        lambda: ck.FirstBlockCacheConfig(treshold=0.1),  # type: ignore[call-arg]
        lambda: ck.enable_cache(Stack(2), ck.FirstBlockCacheConfig()).update(treshold=0.1),
    ):
        with pytest.raises(ValueError, match="did you mean 'threshold'"):
            wrong()


def test_unknown_strategy() -> None:
    with pytest.raises(ValueError, match="did you mean 'first_block'"):
        ck.enable_cache(Stack(2), "firstblock")


@pytest.mark.parametrize("config", [None, 3, ck.CacheConfig(), ck.FirstBlockCacheConfig], ids=repr)
def test_something_that_is_no_config(config: Any) -> None:
    model = Stack(2)
    before = traces(model)
    with pytest.raises(TypeError, match="FirstBlockCacheConfig"):
        ck.enable_cache(model, config)
    assert traces(model) == before


@pytest.mark.parametrize("target", [None, 3, "flux", {"transformer": 1}], ids=repr)
@pytest.mark.parametrize("verb", [lambda t: ck.enable_cache(t, ALWAYS), ck.disable_cache, ck.stats, ck.free])
def test_something_that_is_no_target(verb: Any, target: Any) -> None:
    with pytest.raises(TypeError, match="DiffusionPipeline"):
        verb(target)


def test_a_pipeline_without_a_denoiser() -> None:
    pipe = ToyPipeline(nn.Linear(2, 2), FlowMatchEulerDiscreteScheduler())
    with pytest.raises(ck.UnsupportedModelError, match="pass the module"):
        ck.enable_cache(pipe, ALWAYS)


def test_enabled_twice() -> None:
    pipe = toy_pipeline()
    ck.enable_cache(pipe, ALWAYS)
    for target in (pipe, pipe.transformer):
        with pytest.raises(ck.CacheConflictError, match="disable_cache"):
            ck.enable_cache(target, "taylorseer")
    assert "FirstBlock" in str(ck.stats(pipe))
    pipe()
    assert ck.stats(pipe).reused == 7


def test_diffusers_own_cache() -> None:
    from diffusers import FirstBlockCacheConfig

    pipe = TINY["flux"].build()
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(ck.CacheConflictError, match=r"pipe\.transformer\.disable_cache\(\)"):
        ck.enable_cache(pipe, ALWAYS)
    pipe.transformer.disable_cache()
    with ck.cached(pipe, ALWAYS):
        TINY["flux"].call(pipe, steps=2)


def test_cache_dit() -> None:
    pipe = toy_pipeline()
    pipe._is_cached = True
    with pytest.raises(ck.CacheConflictError, match="cache_dit"):
        ck.enable_cache(pipe, ALWAYS)


def test_an_update_that_needs_other_hooks() -> None:
    pipe = TINY["flux"].build()
    handle = ck.enable_cache(pipe, "taylorseer")
    with pytest.raises(ValueError, match="enable_cache again"):
        handle.update(use_lite_mode=False)
    assert handle.config == ck.TaylorSeerCacheConfig()
    TINY["flux"].call(pipe, steps=5)


def test_a_bad_update_changes_nothing() -> None:
    model = Stack(4)
    handle = ck.enable_cache(model, "first_block", threshold=1e9)
    with pytest.raises(ValueError, match="threshold"):
        handle.update(threshold=-1.0)
    bare_loop(model)
    assert ck.stats(model).reused == 7


def test_update_live() -> None:
    """U83."""
    model = Stack(4)
    handle = ck.enable_cache(model, "first_block", threshold=1e9)

    def at_step(step: int) -> None:
        if step == 4:
            handle.update(threshold=0.0)

    bare_loop(model, at_step=at_step)
    assert [d.reused for d in ck.stats(model).last.decisions] == [False, True, True, True] + [False] * 4
    assert handle.config.threshold == 0.0


def test_an_attention_site_where_there_is_none() -> None:
    with pytest.raises(ck.UnsupportedModelError, match="use_lite_mode=True"):
        ck.enable_cache(Stack(4), "taylorseer", use_lite_mode=False)


@pytest.mark.parametrize("field", ["cache_identifiers", "skip_predict_identifiers"])
def test_identifiers_that_match_nothing(field: str) -> None:
    pipe = TINY["flux"].build()
    with pytest.raises(ck.UnsupportedModelError, match=field):
        ck.enable_cache(pipe, "taylorseer", **{field: ["no_such_block"]})
    assert not ck.is_cache_enabled(pipe)


def test_an_identifier_that_is_no_regular_expression() -> None:
    with pytest.raises(ValueError, match="cache_identifiers"):
        ck.enable_cache(TINY["flux"].build(), "taylorseer", cache_identifiers=["(unclosed"])


def test_a_handle_whose_denoiser_is_gone() -> None:
    handle = ck.enable_cache(Stack(4), ALWAYS)
    import gc

    gc.collect()
    with pytest.raises(RuntimeError, match="no longer exists"):
        handle.update(threshold=0.5)
    handle.disable()


def test_a_module_that_is_no_denoiser() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with pytest.raises(ck.UnsupportedModelError, match="no argument for the timestep"):
        ck.enable_cache(model, ALWAYS)
    assert not ck.is_cache_enabled(model)


def test_a_handle_that_was_disabled() -> None:
    handle = ck.enable_cache(Stack(2), ALWAYS)
    assert "FirstBlock" in repr(handle)
    handle.disable()
    with pytest.raises(RuntimeError, match="enable_cache again"):
        handle.update(threshold=0.1)


def test_a_failure_while_a_strategy_joins_leaves_no_empty_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(2)
    before = traces(model)

    def fail(self: Any, member: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(DenoiserEngine, "add", fail)
        with pytest.raises(KeyboardInterrupt):
            ck.enable_cache(model, ALWAYS)
    assert traces(model) == before
    assert not ck.is_cache_enabled(model)
