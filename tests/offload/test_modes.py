"""Streaming weights: outputs, what is refused and why, errors that name the cure."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

import offload
from offload.files import read_header
from offload.grouping import group_weights

from ..pipelines.tiny import TINY
from ..toys import bare_loop, latents
from .support import BLOCK_BYTES, as_accelerator, contents, weighty, weighty_pipeline

STEP = torch.tensor(1.0)


@torch.no_grad()
def output(model: nn.Module) -> torch.Tensor:
    return model(latents(), STEP)[0]


@pytest.mark.parametrize("name", sorted(TINY))
def test_every_weight_is_in_one_group_or_stays(name: str) -> None:
    pipe = TINY[name].build()
    for granularity in ("block", "leaf"):
        for component in pipe.components.values():
            if isinstance(component, nn.Module):
                grouping = group_weights(component, granularity)
                groups = [id(entry.parameter) for group in grouping.groups for entry in group.entries]
                stays = [id(parameter) for parameter in grouping.resident.values()]
                assert len(set(groups)) == len(groups)
                assert sorted((*groups, *stays)) == sorted(id(parameter) for parameter in component.parameters())


@pytest.mark.parametrize("granularity", ["block", "leaf"])
@pytest.mark.parametrize("name", ["flux", "sd15", "wan", "sana", "sd3", "cogvideox"])
def test_outputs_are_bit_identical(name: str, granularity: str) -> None:
    tiny = TINY[name]
    pipe = tiny.build()
    extra = {"output_type": "pt"} if not tiny.is_video else {}
    base = tiny.call(pipe, steps=2, **extra)
    with offload.enable(pipe, "disk", "cpu", granularity=granularity) as handle:
        assert torch.equal(tiny.call(pipe, steps=2, **extra), base)
        stats = handle.stats()
        assert stats.moved_bytes > 0
        assert stats.extra_buffers == 0 or granularity == "leaf"


def test_sliced_and_tiled_decoding() -> None:
    tiny = TINY["flux"]
    pipe = tiny.build()
    pipe.vae.enable_slicing()
    pipe.vae.enable_tiling()
    base = tiny.call(pipe, steps=2, batch=2, output_type="pt")
    with offload.enable(pipe, "disk", "cpu"):
        assert torch.equal(tiny.call(pipe, steps=2, batch=2, output_type="pt"), base)


def test_buffers_are_two_blocks() -> None:
    model = weighty(8)
    handle = offload.enable(model, "disk", "cpu")
    bare_loop(model, steps=2)
    stats = handle.stats()
    assert stats.offloaded_bytes == 8 * BLOCK_BYTES
    assert stats.buffer_bytes == 2 * 3 * 256, "two buffers, each tensor of a block at a multiple of 256 bytes"
    assert stats.extra_buffers == 0


def test_weights_read_outside_of_a_call_are_not_numbers() -> None:
    model = weighty()
    with offload.enable(model, "disk", "cpu"):
        output(model)
        weight = model.blocks[2].lin.weight
        assert torch.isnan(weight).all()
        assert (weight.shape, weight.dtype, weight.device.type) == ((8, 8), torch.float32, "cpu")


def test_a_module_called_past_its_block_brings_its_weights() -> None:
    model = weighty()
    x = latents()
    with torch.no_grad():
        base = model.blocks[1].lin(x)
        with offload.enable(model, "disk", "cpu"):
            assert torch.equal(model.blocks[1].lin(x), base)


def test_blocks_that_call_blocks_get_one_more_buffer() -> None:
    model = weighty(4)
    inner, outer = list(model.blocks), nn.ModuleList()

    class Nest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.others = nn.Linear(8, 8), [inner[0], inner[1], inner[2]]

        def forward(self, hidden_states: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            return self._deeper(hidden_states, temb, 0)

        def _deeper(self, x: torch.Tensor, temb: torch.Tensor, level: int) -> torch.Tensor:
            return self.others[level](self.lin(x), temb)

    outer.extend([*inner, Nest()])
    model.blocks = outer
    base = output(model)
    hooks = [inner[0].lin, inner[1].lin]
    for number, module in enumerate(hooks):
        module.register_forward_hook(lambda m, a, y, n=number: inner[n + 1](a[0], STEP) * 0 + y)
    with offload.enable(model, "disk", "cpu") as handle:
        assert torch.equal(output(model), base)
        assert handle.stats().extra_buffers > 0


def test_two_threads() -> None:
    model = weighty(6)
    base = [output(model), bare_loop(model, steps=3)[-1]]
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(10):
            if not torch.equal(output(model), base[0]) or not torch.equal(bare_loop(model, steps=3)[-1], base[1]):
                wrong.append(threading.current_thread().name)

    with offload.enable(model, "disk", "cpu"):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_an_exception_in_a_block_leaves_it_usable() -> None:
    model = weighty()
    base = output(model)
    with offload.enable(model, "disk", "cpu"):
        failing = model.blocks[2].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output(model)
        failing.remove()
        assert torch.isnan(model.blocks[2].lin.weight).all()
        assert torch.equal(output(model), base)


def test_files_that_went_away_are_named(tmp_path: Path) -> None:
    model = weighty()
    base = output(model)
    handle = offload.enable(model, "disk", "cpu", folder=tmp_path)
    (path,) = tmp_path.rglob("blocks.2.safetensors")
    aside = path.rename(path.with_suffix(".aside"))
    for _ in range(2):
        with pytest.raises(offload.OffloadError, match=r"blocks\.2.*keep the files"):
            output(model)
    aside.rename(path)
    assert torch.equal(output(model), base)
    handle.disable()


def test_cut_off_files_are_refused(tmp_path: Path) -> None:
    for content in (b"", b"\x10", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]"):
        path = tmp_path / "x.safetensors"
        path.write_bytes(content)
        with pytest.raises(offload.OffloadError, match="no complete safetensors file"):
            read_header(path)


@pytest.mark.parametrize("mode", ["disk", "group"])
def test_what_cannot_be_done_meanwhile_is_refused(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_accelerator(monkeypatch)
    pipe = weighty_pipeline()
    model = pipe.transformer
    base = pipe(steps=2)
    handle = offload.enable(pipe, mode, "cpu")
    pipe.to("cpu")
    for attempt in (
        lambda: pipe.to(torch.float16),
        lambda: model.half(),
        lambda: model.blocks[1].to(torch.float64),
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model.blocks[0]),
        lambda: torch.save(model, io.BytesIO()),
        lambda: model.load_state_dict(model.state_dict()),
        lambda: model(latents().requires_grad_(), STEP),
    ):
        with pytest.raises(offload.OffloadError, match=r"handle\.disable\(\)"):
            attempt()
        assert torch.equal(pipe(steps=2), base)
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        model.blocks[1].lin.weight.mul_(2)
    model.blocks[1].lin.weight.data = torch.ones(8, 8)
    with pytest.raises(offload.OffloadError, match="given other data"):
        pipe(steps=2)
    handle.disable()
    assert torch.equal(model.blocks[1].lin.weight, torch.ones(8, 8)), "what the user put there stays"


def test_state_dicts_hold_the_real_weights(tmp_path: Path) -> None:
    tiny = TINY["flux"]
    pipe = tiny.build()
    before = contents(pipe.transformer)
    base = tiny.call(pipe, steps=2)
    with offload.enable(pipe, "disk", "cpu"):
        now = pipe.transformer.state_dict()
        assert all(torch.equal(now[name], tensor) for name, tensor in before.items())
        pipe.save_pretrained(tmp_path)
    again = DiffusionPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert torch.equal(tiny.call(again, steps=2), base)


def test_a_source_is_used_and_checked(tmp_path: Path) -> None:
    tiny = TINY["flux"]
    pipe = tiny.build()
    base = tiny.call(pipe, steps=2)
    pipe.save_pretrained(tmp_path / "saved")
    size = sum(path.stat().st_size for path in tmp_path.rglob("*"))
    with offload.enable(pipe, "disk", "cpu", source=tmp_path / "saved"):
        assert torch.equal(tiny.call(pipe, steps=2), base)
        assert sum(path.stat().st_size for path in tmp_path.rglob("*")) == size
    with torch.no_grad():
        pipe.transformer.transformer_blocks[0].attn.to_q.weight.add_(1e-3)
    with pytest.raises(offload.OffloadError, match=r"to_q\.weight is another in.*save it again"):
        offload.enable(pipe, "disk", "cpu", source=tmp_path / "saved")
    assert offload.active(pipe) is None
    with pytest.raises(offload.OffloadError, match="no folder"):
        offload.enable(pipe, "disk", "cpu", source=tmp_path / "nowhere")


def test_no_accelerator_is_said_and_disk_offered() -> None:
    pipe = weighty_pipeline()
    base = pipe(steps=2)
    for mode in ("model", "sequential", "group"):
        with pytest.warns(offload.OffloadWarning, match="offload.enable.pipe, 'disk'."):
            handle = offload.enable(pipe, mode, "cpu")
        assert not handle.active
        assert "nothing" in handle.report
        assert torch.equal(pipe(steps=2), base)
        handle.disable()


def test_bad_input() -> None:
    pipe = weighty_pipeline()
    with pytest.raises(ValueError, match="modes are model, group, sequential, disk"):
        offload.enable(pipe, "fast")
    with pytest.raises(ValueError, match=r"folder.*its options are granularity, prefetch, low_cpu_memory"):
        offload.enable(pipe, "group", "cpu", folder="x")
    with pytest.raises(ValueError, match="granularity"):
        offload.enable(pipe, "disk", "cpu", granularity="atoms")
    with pytest.raises(ValueError, match=r"no component 'unet'; there are transformer"):
        offload.enable(pipe, "disk", "cpu", components=["unet"])
    with pytest.raises(ValueError, match="for all components of a pipeline"):
        offload.enable(pipe.transformer, "model")
    with pytest.raises(offload.OffloadError, match="device='auto'"):
        offload.enable(pipe, "disk", "cuda:99")
    with pytest.raises(TypeError, match="expected a pipeline or a module"):
        offload.enable("pipe", "disk")
    with pytest.raises(offload.OffloadError, match="granularity='leaf'"):
        offload.enable(nn.Sequential(nn.Linear(2, 2)), "disk", "cpu")
    assert offload.active(pipe) is None


def test_quantised_weights_stay_and_are_named() -> None:
    class Packed(nn.Parameter):
        pass

    model = weighty()
    model.blocks[1].lin.weight = Packed(model.blocks[1].lin.weight.data)
    base = output(model)
    with offload.enable(model, "disk", "cpu") as handle:
        assert torch.equal(output(model), base)
        assert "blocks.1 stays: its weights are quantised (Packed)" in handle.report


def test_other_offloading_is_taken_off_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    as_accelerator(monkeypatch)
    tiny = TINY["flux"]
    pipe = tiny.build()
    base = tiny.call(pipe, steps=2)
    from accelerate import cpu_offload

    cpu_offload(pipe.transformer, torch.device("cpu"))
    with pytest.warns(offload.OffloadWarning, match="own offloading was switched off"):
        handle = offload.enable(pipe, "disk", "cpu")
    assert torch.equal(tiny.call(pipe, steps=2), base)
    handle.disable()
    pipe.hf_device_map = {"transformer": "cpu"}
    with pytest.warns(offload.OffloadWarning, match="device map was reset"):
        offload.enable(pipe, "model", "cpu").disable()
    pipe.transformer.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")
    with pytest.raises(offload.OffloadError, match="group offload is active"):
        offload.enable(pipe, "disk", "cpu")


def test_a_missing_order_is_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    as_accelerator(monkeypatch)
    tiny = TINY["flux"]
    pipe = tiny.build()
    base = tiny.call(pipe, steps=2)
    monkeypatch.setattr(type(pipe), "model_cpu_offload_seq", None)
    with offload.enable(pipe, "model", "cpu"):
        assert pipe.model_cpu_offload_seq == "text_encoder->text_encoder_2->transformer->vae"
        assert torch.equal(tiny.call(pipe, steps=2), base)
        assert torch.equal(tiny.call(pipe, steps=2), base)
    assert pipe.model_cpu_offload_seq is None


def test_whole_compile_is_refused_and_block_compile_runs() -> None:
    model = weighty()
    base = output(model)
    with pytest.raises(offload.OffloadError, match="compile_repeated_blocks"):
        offload.enable(torch.compile(model, backend="eager"), "disk", "cpu")
    for first in (True, False):
        compiled = weighty()
        if first:
            for block in compiled.blocks:
                block.compile(backend="eager")
        handle = offload.enable(compiled, "disk", "cpu")
        if not first:
            for block in compiled.blocks:
                block.compile(backend="eager")
        for _ in range(3):
            assert torch.equal(output(compiled), base)
        handle.disable()
        assert torch.equal(output(compiled), base)
    torch._dynamo.reset()
