"""Cache, offloading, LoRA and compile in every order give one output; LoRA before, after and during offloading."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

import cachekit as ck
import offload

from ..pipelines.tiny import TINY
from ..toys import pattern
from .support import as_accelerator

STEPS = 4


def short_flux() -> Any:
    """Two double and one single block: compiling takes most of the time here."""
    pipe = TINY["flux"].build()
    pipe.transformer.transformer_blocks = pipe.transformer.transformer_blocks[:2]
    pipe.transformer.single_transformer_blocks = pipe.transformer.single_transformer_blocks[:1]
    return pipe


def add_lora(pipe: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
        pipe.transformer.add_adapter(config, adapter_name="style")


def run(pipe: Any) -> torch.Tensor:
    return TINY["flux"].call(pipe, steps=STEPS, guidance=False)


ACTIONS: dict[str, Callable[[Any, str], Any]] = {
    "cache": lambda pipe, mode: ck.enable_cache(pipe, ck.FirstBlockCacheConfig(threshold=1e9)),
    "offload": lambda pipe, mode: offload.enable(pipe, mode, "cpu"),
    "lora": lambda pipe, mode: add_lora(pipe),
    "compile": lambda pipe, mode: pipe.transformer.compile_repeated_blocks(backend="eager"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disk", "group", "sequential", "model"])
def test_all_orders_agree(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_accelerator(monkeypatch)
    reference = short_flux()
    add_lora(reference)
    ck.enable_cache(reference, ck.FirstBlockCacheConfig(threshold=1e9))
    base = run(reference)
    assert pattern(reference) == "#..."
    plain = run(short_flux())
    assert not torch.equal(base, plain)
    wrong = []
    for order in permutations(ACTIONS):
        torch._dynamo.reset()
        pipe = short_flux()
        for action in order:
            ACTIONS[action](pipe, mode)
        equal = torch.equal(run(pipe), base)
        if not equal or pattern(pipe) != "#...":
            wrong.append(order)
        offload.disable(pipe)
        if not torch.equal(run(pipe), base):
            wrong.append((*order, "disabled"))
    torch._dynamo.reset()
    assert wrong == []


@pytest.mark.parametrize("mode", offload.MODES)
def test_lora_comes_and_goes(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_accelerator(monkeypatch)
    pipe = short_flux()
    plain = run(pipe)
    add_lora(pipe)
    with_lora = run(pipe)
    pipe.transformer.set_adapters(["style"], [0.5])
    half = run(pipe)
    pipe.transformer.delete_adapters(["style"])
    handle = offload.enable(pipe, mode, "cpu")
    assert torch.equal(run(pipe), plain)
    add_lora(pipe)
    assert torch.equal(run(pipe), with_lora)
    pipe.transformer.set_adapters(["style"], [0.5])
    assert torch.equal(run(pipe), half)
    handle.disable()
    assert torch.equal(run(pipe), half)
    handle = offload.enable(pipe, mode, "cpu")
    assert torch.equal(run(pipe), half)
    pipe.transformer.delete_adapters(["style"])
    assert torch.equal(run(pipe), plain)
    handle.disable()
    assert torch.equal(run(pipe), plain)


@pytest.mark.parametrize("mode", offload.MODES)
def test_lora_from_a_file(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_accelerator(monkeypatch)
    pipe = short_flux()
    plain = run(pipe)
    add_lora(pipe)
    weights = convert_state_dict_to_diffusers(get_peft_model_state_dict(pipe.transformer, adapter_name="style"))
    FluxPipeline.save_lora_weights(tmp_path, transformer_lora_layers=weights)
    pipe = short_flux()
    pipe.load_lora_weights(tmp_path)
    base = run(pipe)
    assert not torch.equal(base, plain)
    pipe = short_flux()
    with offload.enable(pipe, mode, "cpu") as handle:
        pipe.load_lora_weights(tmp_path)
        assert handle.active
        assert torch.equal(run(pipe), base)
        pipe.unload_lora_weights()
        assert torch.equal(run(pipe), plain)
    assert torch.equal(run(pipe), plain)
    assert not any(hasattr(module, "_hf_hook") for module in pipe.transformer.modules())
    assert "load_lora_adapter" not in pipe.transformer.__dict__


@pytest.mark.parametrize("mode", ["sequential", "model"])
def test_fusing_while_hooked(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_accelerator(monkeypatch)
    pipe = short_flux()
    add_lora(pipe)
    pipe.transformer.fuse_lora()
    base = run(pipe)
    pipe = short_flux()
    add_lora(pipe)
    with offload.enable(pipe, mode, "cpu"):
        pipe.transformer.fuse_lora()
        assert torch.equal(run(pipe), base)
    assert torch.equal(run(pipe), base)


@pytest.mark.parametrize("mode", ["disk", "group"])
def test_fusing_is_refused_while_weights_are_away(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_accelerator(monkeypatch)
    pipe = short_flux()
    add_lora(pipe)
    base = run(pipe)
    handle = offload.enable(pipe, mode, "cpu")
    with pytest.raises(offload.OffloadError, match=r"call handle.disable\(\) first"):
        pipe.transformer.fuse_lora()
    assert torch.equal(run(pipe), base)
    handle.disable()
    assert torch.equal(run(pipe), base)


@pytest.mark.parametrize("mode", ["sequential", "model"])
def test_a_second_load_goes_on_after_a_failure(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_accelerator(monkeypatch)
    pipe = short_flux()
    base = run(pipe)
    with offload.enable(pipe, mode, "cpu"):
        with pytest.raises((ValueError, OSError)):
            pipe.transformer.load_lora_adapter("no such folder")
        assert torch.equal(run(pipe), base)
    assert torch.equal(run(pipe), base)
