"""Contract 9: skipped blocks do not run, and their weights do not move, whatever was enabled first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import accelerate
import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from diffusers.hooks.group_offloading import ModuleGroup
from torch import nn

import cachekit as ck

from ..pipelines.tiny import TINY
from ..toys import ALWAYS, ScriptedConfig, Stack, bare_loop, latents, of_time, pattern, toy_pipeline

SCRIPT = ScriptedConfig(computed=(0, 4))


class LinearBlock(nn.Module):
    """A block with weights in a submodule, as real ones have."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.calls = nn.Linear(8, 8), 0

    def forward(self, hidden_states: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden_states + self.lin(hidden_states) * 0.1


class Weighty(Stack):
    """A stack of four such blocks."""

    def __init__(self) -> None:
        super().__init__(2)
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(LinearBlock() for _ in range(4))
        self.requires_grad_(False).eval()

    dtype = torch.float32


@pytest.mark.parametrize(("config", "first"), [(ALWAYS, [8, 1, 1, 1]), (SCRIPT, [2] * 4)], ids=["probe", "no probe"])
def test_forwards_are_counted(config: Any, first: list[int]) -> None:
    model = Stack(4)
    with ck.cached(model, config):
        bare_loop(model)
        assert model.calls == first


def test_forwards_of_a_real_double_and_single_stream_model() -> None:
    tiny = TINY["flux"]
    pipe = tiny.build()
    counts = dict.fromkeys(["transformer_blocks", "single_transformer_blocks"], 0)
    for name in counts:
        for block in getattr(pipe.transformer, name):
            block.register_forward_pre_hook(lambda *_, name=name: counts.__setitem__(name, counts[name] + 1))
    with ck.cached(pipe, ALWAYS):
        tiny.call(pipe, steps=6, guidance=False)
        assert pattern(pipe) == "#....."
    assert counts == {"transformer_blocks": 4 + 5, "single_transformer_blocks": 4}


def test_forwards_of_a_real_unet() -> None:
    tiny = TINY["sd15"]
    pipe = tiny.build()
    counts: dict[str, int] = {}
    for name, module in pipe.unet.named_modules():
        if (name.count(".") == 1 and name.startswith(("down_blocks", "up_blocks"))) or name == "mid_block":
            module.register_forward_pre_hook(lambda *_, name=name: counts.__setitem__(name, counts.get(name, 0) + 1))
    with ck.cached(pipe, ALWAYS):
        tiny.call(pipe, steps=6)
        reused, calls = ck.stats(pipe).reused, ck.stats(pipe).calls
    assert reused >= 4
    assert counts["down_blocks.0"] == counts["up_blocks.3"] == calls
    inner = {name: count for name, count in counts.items() if name not in ("down_blocks.0", "up_blocks.3")}
    assert len(inner) == 7
    assert set(inner.values()) == {calls - reused}


# what moves weights, and how to hear of it


class Recorder:
    """Names of the blocks whose weights moved, one set per denoiser call."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.calls = model, [set()]
        self.owner = {}
        for index, block in enumerate(model.blocks):
            for module in block.modules():
                self.owner[id(module)] = index

    def note(self, module: nn.Module) -> None:
        if id(module) in self.owner:
            self.calls[-1].add(self.owner[id(module)])

    def next(self, *_: Any) -> None:
        self.calls.append(set())


def group_offload(kind: str) -> Callable[[nn.Module, Recorder, pytest.MonkeyPatch], None]:
    def enable(model: nn.Module, recorder: Recorder, patch: pytest.MonkeyPatch) -> None:
        original = ModuleGroup.onload_

        def onload(self: ModuleGroup) -> Any:
            for module in self.modules:
                recorder.note(module)
            return original(self)

        patch.setattr(ModuleGroup, "onload_", onload)
        options = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        apply_group_offloading(
            model, onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), offload_type=kind, **options
        )

    return enable


def sequential(model: nn.Module, recorder: Recorder, patch: pytest.MonkeyPatch) -> None:
    original = accelerate.hooks.AlignDevicesHook.pre_forward

    def pre_forward(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder.note(module)
        return original(self, module, *args, **kwargs)

    patch.setattr(accelerate.hooks.AlignDevicesHook, "pre_forward", pre_forward)
    cpu_offload(model, execution_device=torch.device("cpu"))


def layerwise(model: nn.Module, recorder: Recorder, patch: pytest.MonkeyPatch) -> None:
    apply_layerwise_casting(model, storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    for block in model.blocks:
        original = block.lin.to
        block.lin.to = lambda *a, m=block.lin, f=original, **k: (recorder.note(m), f(*a, **k))[1]  # type: ignore


def pre_hooks(model: nn.Module, recorder: Recorder, patch: pytest.MonkeyPatch) -> None:
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, _: recorder.note(module))


MOVERS: dict[str, Any] = {
    "group offload, blocks": group_offload("block_level"),
    "group offload, leaves": group_offload("leaf_level"),
    "accelerate": sequential,
    "layerwise casting": layerwise,
    "pre-hook": pre_hooks,
}


@pytest.mark.parametrize("mover", MOVERS.values(), ids=MOVERS)
@pytest.mark.parametrize("cache_first", [True, False], ids=["cache first", "mover first"])
@pytest.mark.parametrize("config", [ALWAYS, SCRIPT], ids=["first_block", "scripted"])
def test_weights_of_skipped_blocks_stay(
    config: Any, cache_first: bool, mover: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Weighty()
    with ck.cached(plain, config):
        bare_loop(plain)
        wanted = pattern(plain)
    assert wanted.count(".") >= 6
    model = Weighty()
    recorder = Recorder(model)
    if cache_first:
        ck.enable_cache(model, config)
    mover(model, recorder, monkeypatch)
    if not cache_first:
        ck.enable_cache(model, config)
    bare_loop(model, at_step=recorder.next)
    assert pattern(model) == wanted
    always = {0} if config is ALWAYS else set()
    for step, moved in zip(wanted, recorder.calls[1:], strict=True):
        assert moved == ({0, 1, 2, 3} if step == "#" else always)
    ck.disable_cache(model)
    bare_loop(model, 2)
    assert [block.calls for block in model.blocks] == [
        2 + (wanted.count("#") if index or not always else 8) for index in range(4)
    ]
    with suppress(Exception):
        remove_hook_from_submodules(model)


def test_pipeline_offload_keeps_the_skips() -> None:
    """accelerate's hooks on the whole denoiser, as enable_model_cpu_offload sets them, in both orders."""
    pipe = toy_pipeline(change=of_time(torch.cos))
    with ck.cached(pipe, SCRIPT):
        base, wanted = pipe(8, x=latents()), pattern(pipe)
        hook = accelerate.cpu_offload_with_hook(pipe.transformer, execution_device=torch.device("cpu"))[1]
        assert torch.equal(pipe(8, x=latents()), base)
        assert pattern(pipe) == wanted
    with ck.cached(pipe, SCRIPT):
        assert torch.equal(pipe(8, x=latents()), base)
        assert pattern(pipe) == wanted
    hook.remove()
