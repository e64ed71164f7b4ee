"""Contract 6: guidance branches are separate, whatever way guidance reaches the denoiser."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cachekit as ck

from ..pipelines.tiny import TINY
from ..toys import ALWAYS, ScriptedConfig, Stack, bare_loop, latents, of_time, pattern, prompt, toy_pipeline

COND, UNCOND, THIRD = ({"encoder_hidden_states": prompt(seed)} for seed in (1, 2, 3))
CONFIGS: dict[str, Any] = {
    "first_block": ck.FirstBlockCacheConfig(threshold=0.3),
    "reuse": ScriptedConfig(computed=(0, 3, 4)),
    "order 1": ScriptedConfig(computed=(0, 1, 4), order=1),
}


def moving() -> Stack:
    """The residual depends on the conditioning (through x), the latents and the timestep."""
    return Stack(4, lambda x, t: 0.25 * x + torch.cos(t / 4))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_calls_are_two_single_runs(config: Any, order: tuple[int, int]) -> None:
    """No state crosses: each branch gets what it would get alone."""
    calls = [(COND, UNCOND)[i] for i in order]
    alone = []
    for call in calls:
        model = moving()
        with ck.cached(model, config):
            alone.append(bare_loop(model, conditions=[call]))
            assert "." in pattern(model)
    model = moving()
    with ck.cached(model, config):
        both = bare_loop(model, conditions=calls)
        assert ck.stats(model).last.branches == ("cond", "uncond")
    for branch in (0, 1):
        assert all(torch.equal(a, b) for a, b in zip(both[branch::2], alone[branch], strict=True))


@pytest.mark.parametrize("config", [CONFIGS["reuse"], CONFIGS["order 1"]], ids=["reuse", "order 1"])
@pytest.mark.parametrize("through", ["bare", "pipeline"])
def test_one_batched_call_is_two_calls(config: Any, through: str) -> None:
    pair = {"encoder_hidden_states": torch.cat([COND["encoder_hidden_states"], UNCOND["encoder_hidden_states"]])}
    model = moving()
    with ck.cached(model, config):
        two = bare_loop(model, conditions=[COND, UNCOND])
        one = bare_loop(model, conditions=[pair], x=torch.cat([latents()] * 2))
        assert "." in pattern(model)
    for step, batch in enumerate(one):
        torch.testing.assert_close(batch, torch.cat(two[2 * step : 2 * step + 2]))


@pytest.mark.parametrize("name", ["wan", "flux", "qwen-image"])
def test_contexts_name_the_branches_of_real_pipelines(name: str) -> None:
    tiny = TINY[name]
    pipe = tiny.build()
    with ck.cached(pipe, ck.TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=2)):
        tiny.call(pipe, steps=6)
        run = ck.stats(pipe).last
        assert sorted(run.branches) == ["cond", "uncond"]
        for branch in run.branches:
            assert [decision.step for decision in run.of(branch)] == list(range(6))
        assert pattern(pipe, "cond") == pattern(pipe, "uncond") == "##..#."


@pytest.mark.parametrize("names", [("cond", "uncond"), ()], ids=["named", "unnamed"])
@pytest.mark.parametrize("first", [True, False], ids=["switched off", "switched on"])
def test_guidance_switched_half_way(first: bool, names: tuple[str, ...]) -> None:
    """The branch that goes on is not disturbed, the one that appears begins with a computed call."""

    def conditions(index: int) -> list[dict[str, Any]]:
        return [COND, UNCOND] if (index < 4) == first else [COND]

    if names:
        pytest.importorskip("diffusers")
        from diffusers.models.cache_utils import CacheMixin

        class Named(Stack, CacheMixin):
            pass

        model: Stack = Named(4, of_time(torch.cos))
    else:
        model = Stack(4, of_time(torch.cos))
    pipe = toy_pipeline()
    pipe.transformer = model
    with ck.cached(pipe, ScriptedConfig(computed=(0,))):
        pipe(8, conditions=conditions, names=names)
        run = ck.stats(pipe).last
        assert set(run.branches) == {"cond", "uncond"}
        assert [decision.step for decision in run.of("cond")] == list(range(8))
        assert pattern(pipe, "cond") == "#......."
        assert [decision.step for decision in run.of("uncond")] == (list(range(4)) if first else list(range(4, 8)))
        assert pattern(pipe, "uncond") == "#..."


def test_batched_guidance_switched_off_half_way() -> None:
    """The batch shrinks from 2 to 1: the history restarts, the step count does not."""
    model = moving()
    with ck.cached(model, ScriptedConfig(computed=(0,))):
        times = [torch.tensor(float(time)) for time in range(8, 0, -1)]
        with torch.no_grad():
            for step, time in enumerate(times):
                batch = 2 if step < 4 else 1
                model(latents(batch) + step / 8, time, encoder_hidden_states=prompt(1, batch))
        run = ck.stats(model).last
        assert [decision.step for decision in run.decisions] == list(range(8))
        assert pattern(model) == "#...#..."


def test_three_unnamed_branches() -> None:
    model = moving()
    with ck.cached(model, ScriptedConfig(computed=(0, 4))):
        bare_loop(model, conditions=[COND, UNCOND, THIRD])
        run = ck.stats(model).last
        assert run.branches == ("cond", "uncond", "branch2")
        for branch in run.branches:
            assert [decision.step for decision in run.of(branch)] == list(range(8))
            assert pattern(model, branch) == "#...#..."


def test_branches_argument_names_them() -> None:
    model = moving()
    with ck.cached(model, ALWAYS, branches=["uncond", "cond"]):
        bare_loop(model, conditions=[UNCOND, COND])
        assert ck.stats(model).last.branches == ("uncond", "cond")


def test_branches_with_equal_conditioning_and_other_scalars() -> None:
    """Perturbed-attention guidance and the like: the second call differs only in a plain argument."""
    model = moving()
    calls = [{"guidance": 1.0, **COND}, {"guidance": 2.0, **COND}]
    alone = moving()
    with ck.cached(alone, ScriptedConfig(computed=(0, 4))):
        expected = bare_loop(alone, conditions=calls[1:])
    with ck.cached(model, ScriptedConfig(computed=(0, 4))):
        both = bare_loop(model, conditions=calls)
        assert ck.stats(model).last.branches == ("cond", "uncond")
    assert all(torch.equal(a, b) for a, b in zip(both[1::2], expected, strict=True))


def test_guidance_of_real_batched_pipeline_on_and_off() -> None:
    tiny = TINY["sd15"]
    pipe = tiny.build()
    base = tiny.call(pipe, steps=4), tiny.call(pipe, steps=4, guidance=False)
    with ck.cached(pipe, ck.TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1)):
        first = tiny.call(pipe, steps=4), tiny.call(pipe, steps=4, guidance=False)
        assert not torch.equal(first[0], base[0])
        assert not torch.equal(first[1], base[1])
        assert torch.equal(tiny.call(pipe, steps=4), first[0])
