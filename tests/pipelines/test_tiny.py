"""The tiny pipelines keep what the end-to-end tests rely on: they run, repeat, react, and call as their flags say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from .families import unet
from .runs import built
from .tiny import TINY, TinyPipeline

STEPS = 2


@pytest.fixture(params=list(TINY))
def tiny(request: pytest.FixtureRequest) -> TinyPipeline:
    return TINY[request.param]


@pytest.fixture
def pipe(tiny: TinyPipeline) -> DiffusionPipeline:
    return built(tiny.name)


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [found for item in value for found in tensors(item)] if isinstance(value, (list, tuple)) else []


@contextmanager
def recorded(tiny: TinyPipeline, pipe: DiffusionPipeline) -> Iterator[list[tuple[str, list[Any], dict[str, Any]]]]:
    """Collect (denoiser, positional arguments, keyword arguments) of every denoiser call."""
    calls: list[tuple[str, list[Any], dict[str, Any]]] = []
    handles = [
        getattr(pipe, name).register_forward_pre_hook(
            lambda _, args, kwargs, name=name: calls.append((name, list(args), dict(kwargs))), with_kwargs=True
        )
        for name in tiny.denoisers
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def batch_of(call: tuple[str, list[Any], dict[str, Any]]) -> int:
    latents = call[1][0] if call[1] else call[2]["hidden_states"]
    return len(latents)


def text_of(call: tuple[str, list[Any], dict[str, Any]]) -> Any:
    """The text conditioning; Z-Image passes it as the third positional argument."""
    return call[2]["encoder_hidden_states"] if "encoder_hidden_states" in call[2] else call[1][2]


def test_repeats_and_reacts(tiny: TinyPipeline, pipe: DiffusionPipeline) -> None:
    base = tiny.call(pipe, steps=STEPS)
    assert base.dtype == torch.float32
    assert torch.isfinite(base).all()
    changes: list[dict[str, Any]] = [{"prompt": "a red car"}, {"seed": 1}, {"guidance": False}]
    for change in changes:
        other = tiny.call(pipe, steps=STEPS, **change)
        assert torch.isfinite(other).all()
        assert ((other - base).norm() / base.norm()).item() > 0.01, change
    assert torch.equal(tiny.call(pipe, steps=STEPS, guidance=False), other)
    assert torch.equal(tiny.call(pipe, steps=STEPS), base)


def test_other_size_and_batch(tiny: TinyPipeline, pipe: DiffusionPipeline) -> None:
    pair = tiny.call(pipe, steps=STEPS, prompt=["a cat", "a dog"])
    assert len(pair) == 2
    assert not torch.equal(pair[0], pair[1])
    larger = tiny.call(pipe, steps=STEPS, size=1, batch=2)
    assert len(larger) == 2
    assert larger[0].shape != pair[0].shape


def test_builds_equal_weights_and_leaves_the_random_state(tiny: TinyPipeline, pipe: DiffusionPipeline) -> None:
    before = torch.get_rng_state()
    again = tiny.build()
    assert torch.equal(before, torch.get_rng_state())
    for name in tiny.denoisers:
        old, new = getattr(pipe, name).state_dict(), getattr(again, name).state_dict()
        assert all(torch.equal(old[key], new[key]) for key in old)


def test_callback_sees_every_step(tiny: TinyPipeline, pipe: DiffusionPipeline) -> None:
    seen: list[int] = []

    def note(_: DiffusionPipeline, index: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
        seen.append(index)
        return values

    with recorded(tiny, pipe) as calls:
        tiny.call(pipe, steps=3, guidance=False, callback=note)
    assert calls
    assert seen == list(range(len(calls)))


def test_decodes(tiny: TinyPipeline, pipe: DiffusionPipeline) -> None:
    picture = tiny.call(pipe, steps=STEPS, output_type="pt")
    assert torch.isfinite(picture).all()
    assert picture.ndim == (5 if tiny.is_video else 4)
    assert picture.std() > 0


def test_guidance_reaches_the_denoiser_as_the_flags_say(tiny: TinyPipeline, pipe: DiffusionPipeline) -> None:
    with recorded(tiny, pipe) as unguided:
        tiny.call(pipe, steps=STEPS, guidance=False)
    with recorded(tiny, pipe) as guided:
        tiny.call(pipe, steps=STEPS)
    assert unguided
    assert len(guided) == len(unguided) * (2 if tiny.two_call_guidance else 1)
    assert batch_of(guided[0]) == batch_of(unguided[0]) * (2 if tiny.batched_guidance else 1)
    if not (tiny.two_call_guidance or tiny.batched_guidance):
        return
    conditional = text_of(unguided[0])[0]
    branches = [text_of(call)[0] for call in guided[:2]] if tiny.two_call_guidance else list(text_of(guided[0]))
    same = [branch.shape == conditional.shape and torch.allclose(branch, conditional, atol=1e-5) for branch in branches]
    assert same == [tiny.cond_first, not tiny.cond_first]


def test_every_block_changes_its_input(tiny: TinyPipeline, pipe: DiffusionPipeline) -> None:
    """A relative change of 1 % at least, in stacks of four or more, so that reuse cannot be exact by accident."""
    change: dict[str, float] = {}

    def measure(name: str) -> Any:
        def hook(_: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            inputs = [x for x in tensors(args) + tensors(kwargs) if x.is_floating_point()]
            for hidden in tensors(output):
                moves = [((hidden - x).norm() / x.norm()).item() for x in inputs if x.shape == hidden.shape]
                if moves:
                    change[name] = max(change.get(name, 0.0), min(moves))

        return hook

    handles = []
    for denoiser in tiny.denoisers:
        stacks = {n: m for n, m in getattr(pipe, denoiser).named_children() if isinstance(m, torch.nn.ModuleList)}
        assert max(map(len, stacks.values())) >= (3 if denoiser == "unet" else 4)
        for stack, blocks in stacks.items():
            for index, block in enumerate(blocks):
                name = f"{denoiser}.{stack}.{index}"
                handles.append(block.register_forward_hook(measure(name), with_kwargs=True))
    tiny.call(pipe, steps=STEPS)
    for handle in handles:
        handle.remove()
    assert change
    assert min(change.values()) > 0.01, change


@pytest.mark.parametrize(("name", "calls"), [("ddim", 6), ("euler", 6), ("heun", 11), ("pndm", 7)])
def test_unet_schedulers_call_as_often_as_they_do(name: str, calls: int) -> None:
    tiny = TINY["sd15"]
    pipe = unet.scheduler(tiny.build(), name)
    with recorded(tiny, pipe) as seen:
        output = tiny.call(pipe, steps=6)
    assert len(seen) == calls == len(pipe.scheduler.timesteps)
    assert torch.isfinite(output).all()


def test_both_wan_experts_run_and_differ() -> None:
    tiny = TINY["wan-two-experts"]
    pipe = built(tiny.name)
    with recorded(tiny, pipe) as seen:
        tiny.call(pipe, steps=8)
    used = [name for name, _, _ in seen]
    assert set(used) == {"transformer", "transformer_2"}
    assert used == sorted(used)
    assert not torch.equal(pipe.transformer.proj_out.weight, pipe.transformer_2.proj_out.weight)


def test_img2img_strength_shortens_the_run() -> None:
    tiny = TINY["flux-img2img"]
    pipe = built(tiny.name)
    for strength, calls in ((0.25, 2), (0.5, 4), (1.0, 8)):
        with recorded(tiny, pipe) as seen:
            tiny.call(pipe, steps=8, guidance=False, strength=strength)
        assert len(seen) == calls
