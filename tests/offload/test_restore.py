"""`handle.disable()` puts everything back; nothing is left of many rounds; failures change nothing."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.sources import Files

from ..pipelines.tiny import TINY
from .support import as_accelerator, contents, traces, weighty, weighty_pipeline

MODES = ("disk", "group", "sequential", "model")


@pytest.fixture(autouse=True)
def _accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    as_accelerator(monkeypatch)


def ties(module: nn.Module) -> list[set[str]]:
    shared: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), set()).add(name)
    return sorted((names for names in shared.values() if len(names) > 1), key=min)


@pytest.mark.parametrize("mode", MODES)
def test_disable_restores_a_real_pipeline(mode: str) -> None:
    tiny = TINY["flux"]
    pipe = tiny.build()
    base = tiny.call(pipe, steps=3)
    modules = {name: item for name, item in pipe.components.items() if isinstance(item, nn.Module)}
    before = {name: (contents(module), ties(module), traces(module)) for name, module in modules.items()}
    attributes = set(pipe.__dict__)
    with offload.enable(pipe, mode, "cpu") as handle:
        assert handle.active
        assert offload.active(pipe) is handle
        assert torch.equal(tiny.call(pipe, steps=3), base)
    assert offload.active(pipe) is None
    for name, module in modules.items():
        held, tied, left = before[name]
        after = contents(module)
        assert after.keys() == held.keys()
        assert all(torch.equal(after[key], held[key]) for key in held)
        assert ties(module) == tied
        assert traces(module) == left
        assert all(not parameter.is_meta and parameter.is_contiguous() for parameter in module.parameters())
    assert set(pipe.__dict__) == attributes
    assert torch.equal(tiny.call(pipe, steps=3), base)


def test_twenty_rounds_leave_nothing(tmp_path: Path) -> None:
    pipe = weighty_pipeline()
    base = pipe(steps=2)

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(item, torch.Tensor) for item in gc.get_objects())

    def rounds(count: int) -> None:
        for index in range(count):
            mode = MODES[index % len(MODES)]
            options = {"folder": tmp_path} if mode == "disk" else {}
            with offload.enable(pipe, mode, "cpu", **options):
                assert torch.equal(pipe(steps=2), base)

    rounds(4)
    before, threads = tensors(), threading.active_count()
    rounds(20)
    assert tensors() <= before
    assert threading.active_count() <= threads
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("offload")]
    assert list(tmp_path.iterdir()) == []
    assert traces(pipe.transformer) == []


@pytest.mark.parametrize("mode", ["disk", "group"])
def test_a_forgotten_pipeline_goes_with_its_thread_and_files(mode: str, tmp_path: Path) -> None:
    pipe = weighty_pipeline()
    offload.enable(pipe, mode, "cpu", **({"folder": tmp_path} if mode == "disk" else {}))
    pipe(steps=2)
    gone = weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert gone() is None
    for thread in threading.enumerate():
        if thread.name.startswith("offload"):
            thread.join(5)
            assert not thread.is_alive()
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_enabling_again_and_switching() -> None:
    pipe = weighty_pipeline()
    base = pipe(steps=2)
    handles = []
    for mode in ("disk", "disk", "group", "sequential", "sequential", "model", "group", "disk"):
        handles.append(offload.enable(pipe, mode, "cpu"))
        assert torch.equal(pipe(steps=2), base)
        assert [handle.active for handle in handles] == [False] * (len(handles) - 1) + [True]
    offload.disable(pipe)
    offload.disable(pipe)
    assert torch.equal(pipe(steps=2), base)
    assert traces(pipe.transformer) == []


def test_a_full_disk_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = weighty()
    before = contents(model)
    original, count = Files.add, 0

    def add(self: Files, group: Any, folder: Path) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise offload.OffloadError("no space left")
        original(self, group, folder)

    monkeypatch.setattr(Files, "add", add)
    with pytest.raises(offload.OffloadError, match="no space"):
        offload.enable(model, "disk", "cpu", folder=tmp_path)
    assert traces(model) == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in contents(model).items())
    assert list(tmp_path.iterdir()) == []
    assert offload.active(model) is None


def test_unusual_memory_order_comes_back() -> None:
    model = weighty()
    with torch.no_grad():
        weight = model.blocks[1].lin.weight
        weight.data = weight.data.t().contiguous().t()
    strides, before = weight.stride(), weight.detach().clone()
    for mode in ("disk", "group"):
        with offload.enable(model, mode, "cpu"):
            pass
        assert weight.stride() == strides
        assert torch.equal(weight, before)


@pytest.mark.parametrize("mode", MODES)
def test_weights_mapped_from_a_file_stay_where_they_begin_in_their_cache_line(mode: str, tmp_path: Path) -> None:
    """Rounding on the CPU depends on it: this pipeline gives other last bits once its weights begin elsewhere."""
    tiny = TINY["sd15"]
    tiny.build().save_pretrained(tmp_path)
    pipe = type(tiny.build()).from_pretrained(tmp_path)
    pipe.set_progress_bar_config(disable=True)

    def places() -> list[int]:
        return [parameter.data_ptr() % 64 for parameter in pipe.unet.parameters()]

    before, base = places(), tiny.call(pipe, steps=2)
    assert any(before)
    with offload.enable(pipe, mode, "cpu"):
        inside = tiny.call(pipe, steps=2)
    assert (
        torch.equal(inside, base) or mode == "model"
    )  # which computes where weights begin as they do on an accelerator
    assert places() == before
    assert torch.equal(tiny.call(pipe, steps=2), base)
