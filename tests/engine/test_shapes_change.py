"""Calls whose shapes, blocks or arguments differ from the last computed one restart that branch, and nothing fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cachekit as ck

from ..toys import ALWAYS, Block, ScriptedConfig, Stack, bare_loop, latents, pattern, prompt

ONCE = ScriptedConfig(computed=(0,))
CONFIGS = {"first_block": ALWAYS, "scripted": ONCE, "taylor": ScriptedConfig(computed=(0, 1), order=1)}


class Prefixed(Stack):
    """U21: the first call carries a prefix, later ones only the target."""

    def forward(self, hidden_states: Tensor, timestep: Any, **kwargs: Any) -> tuple[Tensor]:
        x = torch.cat([hidden_states, hidden_states]) if float(timestep) >= 8 else hidden_states
        return (super().forward(x, timestep, **kwargs)[0][: len(hidden_states)],)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_inner_shapes_change_while_the_arguments_do_not(config: Any) -> None:
    base = bare_loop(Prefixed(3))
    model = Prefixed(3)
    with ck.cached(model, config):
        for _ in range(2):
            output = bare_loop(model)
            assert pattern(model).startswith("##")
            assert pattern(model).endswith("....")
            assert all(torch.equal(a, b) for a, b in zip(base, output, strict=True))


class Varying(Stack):
    """Runs another number of blocks at odd timesteps (layer skipping)."""

    def forward(self, hidden_states: Tensor, timestep: Any, **kwargs: Any) -> tuple[Tensor]:
        x = hidden_states * 1.0
        for index, block in enumerate(self.blocks):
            if float(timestep) != 4.0 or index != 2:
                x = block(x, torch.as_tensor(timestep))
        return (x,)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_a_block_left_out_in_one_call(config: Any) -> None:
    base = bare_loop(Varying(4))
    model = Varying(4)
    with ck.cached(model, config):
        output = bare_loop(model)
        assert pattern(model)[4] == "#"
        assert "." in pattern(model)[5:]
    for step, (a, b) in enumerate(zip(base, output, strict=True)):
        assert torch.equal(a, b), step


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("what", ["batch", "tokens", "dtype"])
def test_latents_change_in_the_middle_of_a_run(what: str, config: Any) -> None:
    model = Stack(3)
    with ck.cached(model, config), torch.no_grad():
        for step in range(8):
            late = step >= 4
            x = latents(
                2 if late and what == "batch" else 1,
                6 if late and what == "tokens" else 4,
                dtype=torch.float64 if late and what == "dtype" else torch.float32,
            )
            output = model(x, torch.tensor(8.0 - step))[0]
            assert torch.equal(output, x + 1.5)
            assert output.dtype == x.dtype
        run = ck.stats(model).last
        assert [decision.step for decision in run.decisions] == list(range(8)), "the step count goes on"
        assert pattern(model)[4] == "#"
        assert pattern(model)[5:] == "..."


def test_branches_with_texts_of_other_lengths() -> None:
    """U117."""
    model = Stack(3)
    calls = [{"encoder_hidden_states": prompt(1, tokens=2)}, {"encoder_hidden_states": prompt(2, tokens=6)}]
    with ck.cached(model, ONCE):
        bare_loop(model, conditions=calls)
        assert pattern(model, "cond") == pattern(model, "uncond") == "#......."


class Optional(nn.Module):
    """A block that is called with and without its text."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.pairs = nn.ModuleList(Pair() for _ in range(2))

    def forward(self, hidden_states: Tensor, timestep: Tensor, text: Tensor | None = None) -> tuple[Tensor]:
        x = hidden_states * 1.0
        for block in self.pairs:
            x, text = block(x, text)
        for block in self.blocks:
            x = block(x, timestep)
        return (x,)


class Pair(nn.Module):
    def forward(self, hidden_states: Tensor, text: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return hidden_states + 0.25, None if text is None else text + 0.5


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.no_grad()
def test_an_argument_that_is_there_only_sometimes(config: Any) -> None:
    model = Optional()
    base = [model(latents(), torch.tensor(9.0 - step), prompt() if step % 4 < 2 else None)[0] for step in range(8)]
    with ck.cached(model, config):
        for step in range(8):
            output = model(latents(), torch.tensor(9.0 - step), prompt() if step % 4 < 2 else None)[0]
            assert torch.equal(output, base[step])
