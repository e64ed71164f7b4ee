"""Tiny models and ways to watch what is moved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.streamer import Route, Streamer

from ..toys import Stack, ToyPipeline, toy_pipeline


class LinearBlock(nn.Module):
    """A block with weights in a submodule and one of its own, as real ones have; `calls` counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.calls = nn.Linear(8, 8), 0
        self.scale = nn.Parameter(torch.full((8,), 0.1))

    def forward(self, hidden_states: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden_states + self.lin(hidden_states) * self.scale * (1 + 0.01 * temb)


def weighty(blocks: int = 4) -> Stack:
    """A stack of such blocks."""
    model = Stack(2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.blocks = nn.ModuleList(LinearBlock() for _ in range(blocks))
    Weighty.adopt(model)
    return model.eval()


class Weighty(Stack):
    """Tells its dtype by the linear layers."""

    @classmethod
    def adopt(cls, model: Stack) -> None:
        model.__class__ = cls

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0].lin.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.blocks[0].lin.weight.device


BLOCK_BYTES = (64 + 8 + 8) * 4
"""Bytes of the weights of one block."""


def weighty_pipeline(blocks: int = 4) -> ToyPipeline:
    """A pipeline around a stack of blocks with weights."""
    pipe = toy_pipeline()
    pipe.register_modules(transformer=weighty(blocks))
    return pipe


def contents(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all weights and buffers."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@contextmanager
def moves(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the groups whose weights are fetched, in order, as they are asked for."""
    seen: list[str] = []
    original = Streamer._assign

    def assign(self: Streamer, route: Route, group: Any, slot: Any) -> Any:
        seen.append(group.name)
        return original(self, route, group, slot)

    with monkeypatch.context() as patch:
        patch.setattr(Streamer, "_assign", assign)
        yield seen


def as_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU pass as a device with memory of its own."""
    monkeypatch.setattr(offload.modes, "can_offload_to", lambda device: True)


def traces(module: nn.Module) -> list[str]:
    """Whatever offloading could leave on the modules of a model."""
    found: list[str] = []
    for path, inner in module.named_modules():
        state = inner.__dict__
        found += [f"{path}.{name}" for name in ("_apply", "_hf_hook", "_old_forward") if name in state]
        found += [f"{path}.{name}" for name in ("forward",) if name in state]
        found += [f"{path} call"] * (state.get("_compiled_call_impl") is not None)
        for hooks in ("_state_dict_hooks", "_load_state_dict_pre_hooks", "_forward_pre_hooks", "_forward_hooks"):
            found += [f"{path}.{hooks}"] * bool(state.get(hooks))
    return found
