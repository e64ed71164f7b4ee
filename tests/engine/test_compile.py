"""Compiled blocks and models: never silently uncached, whatever was done first."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import cachekit as ck

from ..pipelines.tiny import TINY
from ..toys import ScriptedConfig, Stack, bare_loop, of_time, pattern
from .test_disable_restores import traces

SCRIPT = ScriptedConfig(computed=(0, 4))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Backend:
    """An "eager" backend that counts the graphs it was given and how often they ran."""

    def __init__(self) -> None:
        self.graphs, self.runs = 0, 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return run


def by_block(model: Stack, backend: Any) -> Stack:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def calls_free() -> Stack:
    """The call counters of the toy would make dynamo recompile; these blocks have none."""
    model = Stack(4)

    class Plain(nn.Module):
        def forward(self, hidden_states: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            return hidden_states + torch.cos(temb)

    model.blocks = nn.ModuleList(Plain() for _ in range(4))
    return model


@pytest.mark.parametrize("order", ["compiled first", "cache first", "compiled between two runs"])
def test_compiled_blocks_are_skipped_and_run_compiled(order: str) -> None:
    base = bare_loop(calls_free())
    model, backend = calls_free(), Backend()
    if order == "compiled first":
        by_block(model, backend)
    ck.enable_cache(model, SCRIPT)
    if order == "cache first":
        by_block(model, backend)
    if order == "compiled between two runs":
        bare_loop(model)
        by_block(model, backend)
    outputs = bare_loop(model)
    assert pattern(model) == "#...#..."
    assert torch.allclose(outputs[4], base[4])
    bare_loop(model)
    bare_loop(model)
    assert backend.graphs >= 1, "the trace of the first call must not stop blocks from being compiled for good"
    before = backend.runs
    bare_loop(model)
    assert pattern(model) == "#...#..."
    assert backend.runs - before == 2 * 4, "compiled graphs run in the computed steps only"
    ck.disable_cache(model)
    before = backend.runs
    assert all(torch.allclose(a, b) for a, b in zip(bare_loop(model), base, strict=True))
    assert backend.runs - before == 8 * 4, "disabling leaves the blocks compiled"


def short_flux() -> Any:
    """Two double and one single block: compiling takes most of the time here."""
    pipe = TINY["flux"].build()
    pipe.transformer.transformer_blocks = pipe.transformer.transformer_blocks[:2]
    pipe.transformer.single_transformer_blocks = pipe.transformer.single_transformer_blocks[:1]
    return pipe


def test_compile_repeated_blocks() -> None:
    tiny = TINY["flux"]
    for cache_first in (True, False):
        pipe = short_flux()
        base = tiny.call(pipe, steps=5, guidance=False)
        if cache_first:
            ck.enable_cache(pipe, SCRIPT)
        pipe.transformer.compile_repeated_blocks(backend="eager")
        if not cache_first:
            ck.enable_cache(pipe, SCRIPT)
        output = tiny.call(pipe, steps=5, guidance=False)
        assert pattern(pipe) == "#...#"
        torch.testing.assert_close(output, base, rtol=1.0, atol=1.0)
        assert not torch.equal(output, base)
        ck.disable_cache(pipe)
        torch.testing.assert_close(tiny.call(pipe, steps=5, guidance=False), base)


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_the_whole_model_compiled_after_enabling(how: str) -> None:
    """The cache works on, or says that it does not; it is never silently off."""
    model = Stack(4, of_time(torch.cos))
    base = bare_loop(model)
    ck.enable_cache(model, SCRIPT)
    target: Any = model
    if how == "wrapped":
        target = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    counts = model.calls
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = bare_loop(target)
    ours = [item for item in caught if issubclass(item.category, ck.CacheWarning)]
    run = [after - before for after, before in zip(model.calls, counts, strict=True)]
    assert ours or run == [2] * 4
    assert torch.allclose(outputs[0], base[0])
    assert run == [pattern(model).count("#")] * 4, "what the statistics say is what happened"
    assert ck.is_cache_enabled(target)
    ck.disable_cache(target)
    assert not ck.is_cache_enabled(model)
    assert all(torch.allclose(a, b) for a, b in zip(bare_loop(model), base, strict=True))


def test_the_pipelines_denoiser_compiled_after_enabling(recwarn: pytest.WarningsRecorder) -> None:
    tiny = TINY["flux"]
    pipe = short_flux()
    base = tiny.call(pipe, steps=5, guidance=False)
    ck.enable_cache(pipe, SCRIPT)
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    tiny.call(pipe, steps=5, guidance=False)
    assert pattern(pipe) == "#...#"
    assert not [item for item in recwarn if "replaced" in str(item.message)]
    ck.disable_cache(pipe)
    torch.testing.assert_close(tiny.call(pipe, steps=5, guidance=False), base)


def test_an_optimized_module_is_refused_with_a_cure() -> None:
    model = Stack(4)
    compiled = torch.compile(model, backend="eager")
    before = traces(model)
    with pytest.raises(ck.UnsupportedModelError, match="compile_repeated_blocks"):
        ck.enable_cache(compiled, SCRIPT)
    assert traces(model) == before
    pipe = TINY["flux"].build()
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    with pytest.raises(ck.UnsupportedModelError, match="compile_repeated_blocks"):
        ck.enable_cache(pipe, SCRIPT)


ATTENTION = ck.TaylorSeerCacheConfig(use_lite_mode=False, cache_interval=3, disable_cache_before_step=1)


def test_attention_inside_compiled_blocks_is_refused() -> None:
    pipe = TINY["flux"].build()
    pipe.transformer.compile_repeated_blocks(backend="eager")
    with pytest.raises(ck.UnsupportedModelError, match="compiled"):
        ck.enable_cache(pipe, ATTENTION)


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "model"])
def test_attention_inside_blocks_compiled_later_is_not_silently_computed(whole: bool) -> None:
    tiny = TINY["flux"]
    pipe = short_flux()
    ck.enable_cache(pipe, ATTENTION)
    if whole:
        pipe.transformer.compile(backend="eager")
    else:
        pipe.transformer.compile_repeated_blocks(backend="eager")
    processor = type(pipe.transformer.transformer_blocks[0].attn.processor)
    calls, original = 0, processor.__call__

    @torch.compiler.disable
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(self, *args, **kwargs)

    processor.__call__ = counted
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                tiny.call(pipe, steps=3, guidance=False)
    finally:
        processor.__call__ = original
    computed = ck.stats(pipe).computed
    said = [item for item in caught if issubclass(item.category, ck.CacheWarning)]
    assert calls == 3 * 2 * computed or said
    assert calls >= 3 * 2 * computed
