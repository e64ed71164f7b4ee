"""Contract 2: disabling leaves nothing behind; copies and files made while enabled carry nothing of ours."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.models.cache_utils import CacheMixin
from torch import nn

import cachekit as ck

from ..pipelines.tiny import TINY
from ..toys import ALWAYS, Block, Stack, ToyPipeline, bare_loop, toy_pipeline

CONFIGS = [ALWAYS, ck.TaylorSeerCacheConfig(cache_interval=2), ck.TaylorSeerCacheConfig(use_lite_mode=False)]


def traces(module: nn.Module) -> list[tuple[str, list[str], int, int]]:
    """All that can be left on a module tree."""
    return [
        (name, sorted(part.__dict__), len(part._forward_hooks), len(part._forward_pre_hooks))
        for name, part in module.named_modules()
    ]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", ["flux", "sd15", "latte"])
def test_no_attribute_or_hook_is_left(name: str, config: Any) -> None:
    tiny = TINY[name]
    pipe = tiny.build()
    model = getattr(pipe, tiny.denoisers[0])
    base = tiny.call(pipe, steps=4)
    before, keys, pipe_before = traces(model), list(model.state_dict()), sorted(pipe.__dict__)
    ck.enable_cache(pipe, config)
    tiny.call(pipe, steps=4)
    assert list(model.state_dict()) == keys
    ck.disable_cache(pipe)
    assert traces(model) == before
    assert sorted(pipe.__dict__) == pipe_before
    assert torch.equal(tiny.call(pipe, steps=4), base)


def test_class_level_observers_are_removed_with_the_last_cache() -> None:
    before = CacheMixin.__dict__["cache_context"], DiffusionPipeline.__dict__["progress_bar"]
    first, second = toy_pipeline(), toy_pipeline()
    ck.enable_cache(first, ALWAYS)
    handle = ck.enable_cache(second, ALWAYS)
    ck.disable_cache(first)
    handle.disable()
    handle.disable()
    assert (CacheMixin.__dict__["cache_context"], DiffusionPipeline.__dict__["progress_bar"]) == before


def test_observers_do_not_outlive_a_pipeline_that_was_never_disabled() -> None:
    before = DiffusionPipeline.__dict__["progress_bar"]
    pipe = toy_pipeline()
    ck.enable_cache(pipe, ALWAYS)
    pipe()
    reference = weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert reference() is None
    assert DiffusionPipeline.__dict__["progress_bar"] is before


def test_a_kept_handle_does_not_keep_the_weights_alive() -> None:
    model = Stack(3)
    references = [weakref.ref(model), *(weakref.ref(block) for block in model.blocks)]
    handle = ck.enable_cache(model, ALWAYS)
    bare_loop(model)
    handle.disable()
    del model
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_made_while_enabled_are_plain_and_uncached(copier: Any) -> None:
    model = Stack(4)
    base = bare_loop(model)
    before = traces(model)
    ck.enable_cache(model, ALWAYS)
    bare_loop(model)
    twin = copier(model)
    assert traces(twin) == before
    assert not ck.is_cache_enabled(twin)
    counts = twin.calls
    assert all(torch.equal(a, b) for a, b in zip(bare_loop(twin), base, strict=True))
    assert [after - count for after, count in zip(twin.calls, counts, strict=True)] == [8] * 4
    with ck.cached(twin, ALWAYS):
        bare_loop(twin)


def test_save_pretrained_while_enabled(tmp_path: Path) -> None:
    pipe = TINY["flux"].build()
    model = pipe.transformer
    ck.enable_cache(pipe, ALWAYS)
    TINY["flux"].call(pipe, steps=3)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert not ck.is_cache_enabled(again)
    assert "cache" not in (tmp_path / "config.json").read_text()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


def test_the_same_block_twice_in_a_list() -> None:
    """Weight-shared blocks run more than once; every hook must come off again."""
    model = Stack(2)
    model.blocks = nn.ModuleList([model.blocks[0], model.blocks[0], Block(), model.blocks[0]])
    base = bare_loop(model)
    before = traces(model)
    with ck.cached(model, ALWAYS):
        output = bare_loop(model)
    assert traces(model) == before
    assert all(torch.equal(a, b) for a, b in zip(base, output, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(base, bare_loop(model), strict=True))


def test_disable_through_the_pipeline_also_reaches_a_denoiser_replaced_since() -> None:
    pipe = toy_pipeline()
    old = pipe.transformer
    before = traces(old)
    ck.enable_cache(pipe, ALWAYS)
    pipe()
    pipe.transformer = Stack(4)
    ck.disable_cache(pipe)
    assert traces(old) == before


def test_a_compile_after_enabling_survives_disabling() -> None:
    model = Stack(3)
    ck.enable_cache(model, ALWAYS)
    bare_loop(model)
    model.blocks[1].compile(backend="eager")
    bare_loop(model)
    ck.disable_cache(model)
    assert model.blocks[1]._compiled_call_impl is not None
    assert "_compiled_call_impl" not in model.blocks[0].__dict__
    compiled = model.blocks[1]._compiled_call_impl
    assert "cachekit" not in getattr(compiled, "__module__", "")


def test_disabling_what_is_not_enabled_is_no_error() -> None:
    ck.disable_cache(Stack(2))
    ck.disable_cache(ToyPipeline(Stack(2), None))
