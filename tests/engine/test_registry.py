"""What is registered for a block class wins over what discovery finds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import cachekit as ck

from ..toys import ScriptedConfig, latents, pattern

METADATA = ck.TransformerBlockMetadata(return_hidden_states_index=1, return_encoder_hidden_states_index=0)


class Crossing(nn.Module):
    """Text first in the result, and each output resembles the argument of the *other* stream."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        text = encoder_hidden_states + 4 * (hidden_states - encoder_hidden_states)
        image = hidden_states + 4 * (encoder_hidden_states - hidden_states)
        return text, image


class Pair(nn.Module):
    """Two streams of equal shape."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Crossing() for _ in range(3))

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, timestep: Tensor) -> tuple[Tensor]:
        x, text = hidden_states * 1.0, encoder_hidden_states * 1.0
        for block in self.blocks:
            text, x = block(hidden_states=x, encoder_hidden_states=text)
        return (x,)


@pytest.fixture
def registered() -> Iterator[None]:
    ck.TransformerBlockRegistry.register(Crossing, METADATA)
    yield
    ck.TransformerBlockRegistry.unregister(Crossing)


@torch.no_grad()
def outputs(model: Pair, moves: tuple[float, ...]) -> list[Tensor]:
    """Only the image moves; the text stays."""
    times = range(len(moves), 0, -1)
    return [
        model(latents() + move, latents(seed=5), torch.tensor(float(t)))[0]
        for move, t in zip(moves, times, strict=True)
    ]


def streams(model: Pair) -> float:
    """How far a skipped step moves for an image that moved by one."""
    with ck.cached(model, ScriptedConfig(computed=(0,))):
        first, second = outputs(model, (0.0, 1.0))
        assert pattern(model) == "#."
    return float((second - first).mean())


@pytest.mark.usefixtures("registered")
def test_registered_streams_win() -> None:
    """With the right streams a skipped stack adds its change to the image, which moved by one."""
    assert streams(Pair()) == 1.0


def test_discovery_is_misled_without_the_registration() -> None:
    """The test above can fail: each output resembles the other stream."""
    model = Pair()
    with ck.cached(model, ScriptedConfig(computed=(0,))), warnings.catch_warnings():
        warnings.simplefilter("ignore", ck.CacheWarning)
        first, second = outputs(model, (0.0, 1.0))
        assert pattern(model) == "##" or float((second - first).mean()) != 1.0


@pytest.mark.usefixtures("registered")
def test_frozen_inputs_are_exact_with_registered_streams() -> None:
    model = Pair()
    base = outputs(model, (0.0,) * 4)
    with ck.cached(model, ScriptedConfig(computed=(0,))):
        assert all(torch.equal(a, b) for a, b in zip(outputs(model, (0.0,) * 4), base, strict=True))


@pytest.mark.usefixtures("registered")
def test_subclasses_inherit_the_entry() -> None:
    class Child(Crossing):
        pass

    assert ck.TransformerBlockRegistry.find(Child) is METADATA
    model = Pair()
    model.blocks = nn.ModuleList(Child() for _ in range(3))
    assert streams(model) == 1.0


def test_what_cannot_be_registered() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        ck.TransformerBlockRegistry.register(int, METADATA)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="TransformerBlockMetadata"):
        ck.TransformerBlockRegistry.register(Crossing, {})  # type: ignore[arg-type]
    ck.TransformerBlockRegistry.unregister(Crossing)
    assert ck.TransformerBlockRegistry.find(Crossing) is None


def test_a_registration_that_names_no_argument_of_the_block_is_said() -> None:
    """A wrong entry must not pass unnoticed."""
    wrong = ck.TransformerBlockMetadata(hidden_states_argument_name="no_such_argument")
    ck.TransformerBlockRegistry.register(Crossing, wrong)
    try:
        model = Pair()
        with ck.cached(model, ScriptedConfig(computed=(0,))), pytest.warns(ck.CacheWarning):
            outputs(model, (0.0, 1.0))
    finally:
        ck.TransformerBlockRegistry.unregister(Crossing)
