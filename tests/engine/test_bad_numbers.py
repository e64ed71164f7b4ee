"""Contract 5: NaN and Inf compute; blocks that write into their input are noticed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cachekit as ck

from ..toys import ALWAYS, Block, ScriptedConfig, Stack, bare_loop, latents, of_time, pattern, reasons, toy_pipeline


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_a_score_that_is_no_number_computes(bad: float) -> None:
    def change(x: Tensor, t: Tensor) -> Tensor:
        return torch.where(t == 5, torch.full_like(x, bad), torch.full_like(x, 0.5))

    model = Stack(4, change)
    base = bare_loop(model)
    with ck.cached(model, ALWAYS):
        output = bare_loop(model)
        steps = pattern(model)
    assert steps[:3] == "#.."
    assert steps[3] == "#"
    assert steps[4] == "#", "the signal of the bad step is no reference either"
    assert steps[5:] == "..."
    assert all(torch.equal(a, b) for a, b in zip(base[4:], output[4:], strict=True))


@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_a_probe_that_changes_nothing_computes() -> None:
    """0/0: a zero residual gives no score, so nothing may be skipped on its word."""
    model = Stack(4, of_time(torch.sin))
    model.blocks[0].weight.zero_()
    with ck.cached(model, ALWAYS):
        bare_loop(model)
        assert pattern(model) == "#" * 8


@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_nan_is_noted_in_the_statistics() -> None:
    pipe = toy_pipeline(change=lambda x, t: torch.full_like(x, float("nan")))
    with ck.cached(pipe, ALWAYS):
        pipe()
        assert any("finite" in note for note in ck.stats(pipe).last.notes)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
PLACES = {"probe": [0], "first": [1], "last": [3], "all": [0, 1, 2, 3], "middle": [2]}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("config", [ALWAYS, ScriptedConfig(computed=(0, 4))], ids=["first_block", "scripted"])
def test_in_place_blocks(config: Any, places: list[int], mode: Callable[[], AbstractContextManager[Any]]) -> None:
    model = Stack(4, in_place=places)
    with mode():
        base = bare_loop(model)
        with ck.cached(model, config):
            output = bare_loop(model)
            again = bare_loop(model)
            assert pattern(model).count(".") >= 6
    assert all(torch.equal(a, b) for a, b in zip(base, output, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(base, again, strict=True))


class Handed(Block):
    """Returns its input object at even timesteps (a skipped layer), and a new tensor at odd ones."""

    def forward(self, hidden_states: Tensor, temb: Tensor) -> Tensor:
        self.calls += 1
        return hidden_states if int(temb) % 2 == 0 else hidden_states + 0.0


@pytest.mark.parametrize("config", [ALWAYS, ScriptedConfig(computed=(0, 1, 2, 4))], ids=["first_block", "scripted"])
def test_in_place_write_behind_a_block_that_hands_its_input_on(config: Any) -> None:
    """Skip-layer guidance: the second block returns its input, and the third overwrites it."""
    model = Stack(4, in_place=[2])
    position = 0 if isinstance(config, ScriptedConfig) else 1
    model.blocks[position] = Handed()
    times = [torch.tensor(float(time)) for time in (9, 8, 6, 5, 4, 3, 2, 1)]
    base = bare_loop(model, times=times)
    with ck.cached(model, config):
        output = bare_loop(model, times=times)
        assert "." in pattern(model)
    assert all(torch.equal(a, b) for a, b in zip(base, output, strict=True))


def test_a_block_that_starts_to_write_in_place_later() -> None:
    model = Stack(4)
    base = bare_loop(model)

    def at_step(step: int) -> None:
        model.blocks[1].in_place = step >= 3

    with ck.cached(model, ScriptedConfig(computed=(0, 3, 5))):
        output = bare_loop(model, at_step=at_step)
    assert all(torch.equal(a, b) for a, b in zip(base, output, strict=True))


class Wrapped(nn.Module):
    """A denoiser that writes into the latents it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(in_place=True) for _ in range(3))

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> tuple[Tensor]:
        for block in self.blocks:
            hidden_states = block(hidden_states, timestep)
        return (hidden_states,)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_a_denoiser_without_an_input_projection() -> None:
    """The first block overwrites the caller's latents; the outputs are right all the same."""
    model = Wrapped()
    with ck.cached(model, ScriptedConfig(computed=(0,))):
        for step in range(4):
            assert torch.equal(model(latents(seed=step), torch.tensor(4.0 - step))[0], latents(seed=step) + 1.5)
        assert reasons(model)
