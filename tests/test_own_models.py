"""Own modules: the mixin, named branches, block lists and block classes of the user's own."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.hooks._helpers import TransformerBlockMetadata as ForeignMetadata
from torch import Tensor, nn

import cachekit as ck
from cachekit.engine import observers

from .toys import ALWAYS, ScriptedConfig, Stack, bare_loop, latents, pattern, prompt


class Own(ck.CacheMixin, Stack):
    """Knows nothing of diffusers."""


def test_the_mixin_enables_and_disables() -> None:
    model = Own(change=lambda x, t: x * 0.5)
    base = bare_loop(model)
    assert not model.is_cache_enabled
    handle = model.enable_cache(ck.FirstBlockCacheConfig(1e9))
    assert model.is_cache_enabled
    assert handle.config.threshold == 1e9  # type: ignore[attr-defined]
    assert not all(torch.equal(a, b) for a, b in zip(bare_loop(model), base, strict=True))
    assert pattern(model) == "#......."
    model.disable_cache()
    assert not model.is_cache_enabled
    assert all(torch.equal(a, b) for a, b in zip(bare_loop(model), base, strict=True))
    model.disable_cache()


def test_the_mixin_takes_what_the_functions_take() -> None:
    model = Own()
    model.enable_cache("first_block", threshold=0.3, strict=True, branches=("a", "b"))
    bare_loop(model, conditions=[{"encoder_hidden_states": prompt(i)} for i in (1, 2)])
    assert ck.stats(model).last.branches == ("a", "b")  # type: ignore[union-attr]
    with pytest.raises(ck.CacheConflictError):
        model.enable_cache("first_block")
    model.disable_cache("first_block")
    assert not model.is_cache_enabled
    with pytest.raises(ValueError, match="unknown strategy"):
        model.disable_cache("no_such_strategy")


def test_the_mixin_leaves_nothing_on_the_model() -> None:
    model = Own()
    before = dict(model.__dict__), list(model.state_dict())
    model.enable_cache(ALWAYS)
    with model.cache_context("cond"):
        bare_loop(model)
    assert list(model.state_dict()) == before[1]
    twin = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(Bare().eval()))
    assert not twin.is_cache_enabled
    assert not again.is_cache_enabled
    model.disable_cache()
    assert model.__dict__.keys() == before[0].keys()


class Bare(ck.CacheMixin, nn.Module):
    """Can be pickled."""


def test_the_mixin_on_something_else_than_a_module() -> None:
    with pytest.raises(TypeError, match="denoiser module"):
        ck.CacheMixin().enable_cache("first_block")
    with pytest.raises(TypeError, match="takes a module"), ck.CacheMixin().cache_context("cond"):
        pass


def guided(model: nn.Module, name: Any, steps: int = 6) -> None:
    """Two calls with equal arguments in every step; only the names tell them apart."""
    with torch.no_grad():
        for step in range(steps):
            for branch in ("cond", "uncond"):
                with name(branch):
                    model(latents() + step * 0.125, torch.tensor(float(steps - step)))


@pytest.mark.parametrize("way", ["mixin", "function"])
def test_named_branches(way: str) -> None:
    model: Any = Own() if way == "mixin" else Stack()
    ck.enable_cache(model, ScriptedConfig(computed=(0, 3)))
    guided(model, model.cache_context if way == "mixin" else lambda name: ck.cache_context(model, name))
    assert (pattern(model, "cond"), pattern(model, "uncond")) == ("#..#..",) * 2
    assert ck.stats(model).calls == 12


def test_without_names_equal_calls_are_steps() -> None:
    """The test above can fail."""
    from contextlib import nullcontext

    model = Stack()
    ck.enable_cache(model, ScriptedConfig(computed=(0, 3)))
    guided(model, lambda name: nullcontext())
    assert ck.stats(model).last.branches == ("cond",)  # type: ignore[union-attr]


def test_names_nest_and_end_with_their_block() -> None:
    model, other = Stack(), Stack()
    with ck.cache_context(model, "a"):
        with ck.cache_context(other, "b"), ck.cache_context(model, "c"):
            assert (observers.context_name(model), observers.context_name(other)) == ("c", "b")
        assert observers.context_name(model) == "a"
        with pytest.raises(KeyError), ck.cache_context(model, "d"):
            raise KeyError
        assert observers.context_name(model) == "a"
    assert observers.context_name(model) is None


def test_bad_names() -> None:
    for arguments in ((Stack(), 3), ("model", "cond")):
        with pytest.raises(TypeError, match="a module and a name"), ck.cache_context(*arguments):  # type: ignore[arg-type]
            pass


def test_a_name_given_by_diffusers_own_mixin_and_by_the_function_are_one() -> None:
    model = FluxTransformer2DModel(num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2)
    ck.enable_cache(model, "first_block")
    for context in (model.cache_context("x"), ck.cache_context(model, "x")):
        with context:
            assert observers.context_name(model) == "x"
    compiled = torch.compile(model, backend="eager")
    with ck.cache_context(compiled, "y"):
        assert observers.context_name(model) == "y"


def test_the_mixin_takes_the_position_that_diffusers_takes() -> None:
    with Own().cache_context("cond", step_index=3, num_inference_steps=8, timestep=0.5, sigma=0.5):
        pass


class InSequential(nn.Module):
    """Blocks in an `nn.Sequential`, called as one."""

    class Block(nn.Module):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return hidden_states + 0.5

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.Block() for _ in range(4)))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor]:
        return (self.blocks(x * 1.0),)


def test_blocks_in_a_sequential_are_found() -> None:
    model = InSequential()
    base = bare_loop(model)
    runs: list[int] = []
    model.blocks[2].register_forward_pre_hook(lambda *_: runs.append(1))
    with ck.cached(model, ALWAYS) as handle:
        assert "blocks (4)" in handle.report
        outputs = bare_loop(model)
        assert pattern(model) == "#......."
    assert len(runs) == 1
    assert all(torch.equal(a, b) for a, b in zip(outputs, base, strict=True))


class OfTorchLayers(nn.Module):
    """torch's own transformer layers as blocks."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, sample: Tensor, timestep: Tensor) -> tuple[Tensor]:
        return (self.encoder(sample + timestep),)


def test_torch_layers_as_blocks() -> None:
    model = OfTorchLayers().eval()
    base = bare_loop(model)
    with ck.cached(model, ALWAYS):
        outputs = bare_loop(model)
        assert pattern(model) == "#......."
    assert not torch.equal(outputs[-1], base[-1])
    assert all(torch.equal(a, b) for a, b in zip(bare_loop(model), base, strict=True))


def test_lists_of_plain_layers_are_no_blocks() -> None:
    model = nn.Module()
    model.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    model.forward = lambda x, t: model.layers(x)  # type: ignore[method-assign]
    with pytest.raises(ck.UnsupportedModelError):
        ck.enable_cache(model, "first_block")


def test_diffusers_metadata_is_accepted() -> None:
    class Block(nn.Module):
        pass

    foreign = ForeignMetadata(
        return_hidden_states_index=1, return_encoder_hidden_states_index=0, hidden_states_argument_name="image"
    )
    try:
        ck.TransformerBlockRegistry.register(model_class=Block, metadata=foreign)
        found = ck.TransformerBlockRegistry.find(Block)
        assert found == ck.TransformerBlockMetadata(1, 0, "image", "encoder_hidden_states")
    finally:
        ck.TransformerBlockRegistry.unregister(Block)


class TwoStreams(nn.Module):
    """Own argument names, text first in the result."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, picture: Tensor, words: Tensor, when: Tensor) -> dict[str, Tensor]:
            both = self.linear(torch.cat([picture, words], dim=1) + when)
            return {"words": words + both[:, -2:], "picture": picture + both[:, :-2]}

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, latents: Tensor, t: Tensor, encoder_hidden_states: Tensor) -> tuple[Tensor]:
        state = {"picture": latents, "words": encoder_hidden_states}
        for block in self.stages:
            state = block(**state, when=t)
        return (state["picture"],)


def test_an_own_block_class_needs_no_registration() -> None:
    torch.manual_seed(0)
    model, condition = TwoStreams(), [{"encoder_hidden_states": prompt()}]
    base = bare_loop(model, conditions=condition)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ck.CacheWarning)
        with ck.cached(model, ck.TaylorSeerCacheConfig(2)):
            outputs = bare_loop(model, conditions=condition)
            assert pattern(model) == "###.#.#."
    for output, expected in zip(outputs, base, strict=True):
        torch.testing.assert_close(output, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))
