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


class Casting(Block):
    """Gives its result in half precision."""

    def forward(self, hidden_states: Tensor, temb: Tensor) -> Tensor:
        return super().forward(hidden_states, temb).to(torch.bfloat16)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("position", [0, 1, 3])
def test_a_block_that_returns_another_dtype_than_it_was_given(position: int, config: Any) -> None:
    """Mixed precision: a skipped call gives the dtype of a computed one."""
    model = Stack(4)
    model.blocks[position] = Casting()
    base = bare_loop(model)
    with ck.cached(model, config):
        output = bare_loop(model)
        assert "." in pattern(model)
    assert [result.dtype for result in output] == [result.dtype for result in base]
    assert all(torch.equal(a, b) for a, b in zip(base, output, strict=True))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_autocast(config: Any) -> None:
    model = Stack(2)
    torch.manual_seed(0)
    model.blocks = nn.ModuleList(Projected() for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        base = bare_loop(model, move=0.0, times=[torch.tensor(3.0)] * 6)
        with ck.cached(model, config):
            output = bare_loop(model, move=0.0, times=[torch.tensor(3.0)] * 6)
            assert "." in pattern(model)
    for a, b in zip(base, output, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0.01, atol=0.01)


class Projected(nn.Module):
    """A linear layer: half precision under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor, temb: Tensor) -> Tensor:
        return self.lin(hidden_states) + hidden_states.to(torch.bfloat16)


class Outputs(dict[str, Tensor]):
    """A mapping, as diffusers' output classes are."""


class InMapping(Block):
    def forward(self, hidden_states: Tensor, temb: Tensor) -> Any:
        return {"sample": super().forward(hidden_states, temb), "seen": temb * 2}


class InTuple(Block):
    def forward(self, hidden_states: Tensor, temb: Tensor) -> Any:
        return (super().forward(hidden_states, temb), None, temb * 2)


class Unpacking(Stack):
    """Blocks return tuples or mappings with more in them than the stream."""

    def forward(self, hidden_states: Tensor, timestep: Any, **kwargs: Any) -> tuple[Tensor]:
        x, seen = hidden_states * 1.0, torch.zeros(())
        for block in self.blocks:
            result = block(x, torch.as_tensor(timestep))
            x, seen = (result["sample"], result["seen"]) if isinstance(result, dict) else (result[0], result[2])
        return (x + seen * 0,)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("kind", [InMapping, InTuple])
def test_results_that_are_tuples_or_mappings(kind: type[Block], config: Any) -> None:
    model = Unpacking(2)
    model.blocks = nn.ModuleList(kind() for _ in range(4))
    base = bare_loop(model)
    with ck.cached(model, config):
        output = bare_loop(model)
        assert "." in pattern(model)
    assert all(torch.equal(a, b) for a, b in zip(base, output, strict=True))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_caller_may_write_into_what_it_gets(config: Any) -> None:
    """Neither the returned tensor nor the latents passed in are parts of the kept state."""
    model = Stack(3)

    @torch.no_grad()
    def loop() -> list[Tensor]:
        x, results = latents(), []
        for step in range(8):
            output = model(x, torch.tensor(8.0 - step))[0]
            results.append(output.clone())
            output.zero_()
            x.add_(0.125)
        return results

    base = loop()
    with ck.cached(model, config):
        assert all(torch.equal(a, b) for a, b in zip(base, loop(), strict=True))
        assert "." in pattern(model)


class LastWord(Stack):
    """Overwrites the result of its stack in place, as an in-place output layer does."""

    def forward(self, hidden_states: Tensor, timestep: Any, **kwargs: Any) -> tuple[Tensor]:
        return (super().forward(hidden_states, timestep)[0].mul_(0.5),)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_in_place_layer_behind_the_stack(mode: Any, config: Any) -> None:
    model = LastWord(3)
    with mode():
        base = bare_loop(model)
        with ck.cached(model, config):
            for _ in range(2):
                output = bare_loop(model)
                assert "." in pattern(model)
                assert all(torch.equal(a, b) for a, b in zip(base, output, strict=True))
