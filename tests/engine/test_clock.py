"""The clock: steps, totals and runs are right with every scheduler and every way of passing timesteps."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
    PNDMScheduler,
    UniPCMultistepScheduler,
)

import cachekit as ck

from ..pipelines.tiny import TINY
from ..toys import (
    ALWAYS,
    ScriptedConfig,
    Stack,
    SyncsPerCall,
    ToyPipeline,
    bare_loop,
    latents,
    of_time,
    pattern,
    prompt,
    toy_pipeline,
)

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
NEVER = ScriptedConfig(computed=tuple(range(100)))
NAMES = (
    "CogVideoXDDIMScheduler",
    "DDIMParallelScheduler",
    "DDIMScheduler",
    "DDPMParallelScheduler",
    "DDPMScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "EDMDPMSolverMultistepScheduler",
    "EDMEulerScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "HeunDiscreteScheduler",
    "IPNDMScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "LCMScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "SASolverScheduler",
    "TCDScheduler",
    "UniPCMultistepScheduler",
)
NEEDS = {"LMSDiscreteScheduler": "scipy"}


def scheduler(name: str) -> Any:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    cls = getattr(diffusers, name)
    known = inspect.signature(cls.__init__).parameters
    wanted = {"clip_sample": False, "skip_prk_steps": True}
    return cls(**{key: value for key, value in wanted.items() if key in known})


def steps_of(target: Any, branch: str | None = None) -> list[int]:
    run = ck.stats(target).last
    return [decision.step for decision in (run.decisions if branch is None else run.of(branch))]


@pytest.mark.parametrize("style", ["raw", "expand", "float", "scaled", "new"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_every_scheduler(name: str, style: str) -> None:
    pipe = ToyPipeline(Stack(2, of_time(torch.zeros_like)), scheduler(name))
    with ck.cached(pipe, NEVER):
        for runs, steps in enumerate((6, 6, 5), start=1):
            pipe(steps, style=style)
            stats = ck.stats(pipe)
            entries = len(pipe.scheduler.timesteps)
            assert stats.denoisers["transformer"].runs == runs, "every call of the pipeline is one run"
            assert stats.last.calls == entries
            # A repeated timestep is a step of its own only for those who see the scheduler's entry.
            if stats.last.source == "scheduler":
                assert steps_of(pipe) == list(range(entries))
                assert stats.last.steps == entries
            else:
                assert steps_of(pipe) == sorted(steps_of(pipe))
        told = stats.last.source
    if style in ("raw", "expand") or hasattr(pipe.scheduler, "step_index"):
        assert told == "scheduler"


@pytest.mark.parametrize("set_begin", [True, False], ids=["begin index", "no begin index"])
@pytest.mark.parametrize("style", ["expand", "scaled"])
@pytest.mark.parametrize(
    "cls", [FlowMatchEulerDiscreteScheduler, EulerDiscreteScheduler, UniPCMultistepScheduler, DDIMScheduler]
)
def test_image_to_image_starts_in_the_middle(cls: Any, style: str, set_begin: bool) -> None:
    pipe = ToyPipeline(Stack(2), cls())
    with ck.cached(pipe, ScriptedConfig(computed=(0, 3))):
        pipe(10, begin=4, style=style, set_begin=set_begin)
        assert steps_of(pipe) == list(range(6))
        assert pattern(pipe) == "#..#.."
        if ck.stats(pipe).last.source == "scheduler" and (set_begin or style == "expand"):
            assert ck.stats(pipe).last.steps == 6


@pytest.mark.parametrize("strength", [0.3, 0.5, 1.0])
def test_real_image_to_image(strength: float) -> None:
    """U105."""
    tiny = TINY["flux-img2img"]
    pipe = tiny.build()
    with ck.cached(pipe, ScriptedConfig(computed=(0, 2))):
        tiny.call(pipe, steps=10, strength=strength, guidance=False)
        count = round(10 * strength)
        assert steps_of(pipe) == list(range(count))
        assert ck.stats(pipe).last.steps == count


@pytest.mark.parametrize("style", ["raw", "expand", "scaled", "new"])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("cls", [FlowMatchEulerDiscreteScheduler, EulerDiscreteScheduler, DDIMScheduler])
def test_a_scheduler_that_nobody_steps(cls: Any, calls: int, style: str) -> None:
    """Pipelines that integrate by themselves leave the scheduler where it was."""
    conditions = [{"encoder_hidden_states": prompt(seed)} for seed in range(calls)]
    pipe = ToyPipeline(Stack(3), cls())
    with ck.cached(pipe, ScriptedConfig(computed=(0, 4))):
        for _ in range(2):
            pipe(8, advance=False, style=style, conditions=conditions)
            assert steps_of(pipe, "cond") == list(range(8))
            assert pattern(pipe, "cond") == "#...#..."
        assert ck.stats(pipe).denoisers["transformer"].runs == 2


def test_heun_steps_once_per_call() -> None:
    pipe = ToyPipeline(Stack(2), HeunDiscreteScheduler())
    with ck.cached(pipe, ALWAYS):
        pipe(6)
        assert steps_of(pipe) == list(range(11))
        assert ck.stats(pipe).last.steps == 11
        assert ck.stats(pipe).reused <= ck.stats(pipe).calls
        str(ck.stats(pipe))


def test_pndm_with_two_calls_a_step() -> None:
    pipe = ToyPipeline(Stack(2), PNDMScheduler(skip_prk_steps=True))
    with ck.cached(pipe, ScriptedConfig(computed=(0, 4))):
        pipe(6, conditions=[{"encoder_hidden_states": prompt(1)}, {"encoder_hidden_states": prompt(2)}])
        assert steps_of(pipe, "cond") == steps_of(pipe, "uncond") == list(range(7))


def by_hand(pipe: ToyPipeline, steps: int, style: str = "expand", conditions: Any = ({},)) -> torch.Tensor:
    """A loop of the user's own with the parts of a pipeline."""
    pipe.scheduler.set_timesteps(steps)
    x = latents()
    with torch.no_grad():
        for t in pipe.scheduler.timesteps:
            noise = [pipe._denoise(pipe.transformer, x, t, style, call, ()) for call in conditions]
            x = pipe._advance(sum(noise) / len(noise), t, x, torch.Generator().manual_seed(0))
    return x


@pytest.mark.parametrize("style", ["raw", "expand", "scaled", "float", "new"])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("cls", [FlowMatchEulerDiscreteScheduler, DDIMScheduler, UniPCMultistepScheduler])
def test_a_loop_by_hand_with_the_pipelines_scheduler(cls: Any, calls: int, style: str) -> None:
    conditions = [{"encoder_hidden_states": prompt(seed)} for seed in range(calls)]
    pipe = ToyPipeline(Stack(3), cls())
    with ck.cached(pipe, ScriptedConfig(computed=(0, 4))):
        for runs in (1, 2, 3):
            by_hand(pipe, 8, style, conditions)
            assert ck.stats(pipe).denoisers["transformer"].runs == runs
            for branch in ck.stats(pipe).last.branches:
                assert steps_of(pipe, branch) == list(range(8))
                assert pattern(pipe, branch) == "#...#..."
        pipe(5, conditions=conditions)
        assert steps_of(pipe, "cond") == list(range(5))


@pytest.mark.parametrize("aborted", [False, True])
@pytest.mark.parametrize("style", ["raw", "scaled"])
@torch.no_grad()
def test_the_same_list_of_timesteps_walked_again(style: str, aborted: bool) -> None:
    """Nobody calls `set_timesteps` between two loops of the user's own: going back to its start is a new run."""
    pipe = ToyPipeline(Stack(3), DDIMScheduler())
    pipe.scheduler.set_timesteps(8)
    with ck.cached(pipe, ScriptedConfig(computed=(0, 4))):
        for runs in (1, 2):
            for t in pipe.scheduler.timesteps[: 5 if aborted else 8]:
                pipe._denoise(pipe.transformer, latents(), t, style, {}, ())
            assert ck.stats(pipe).denoisers["transformer"].runs == runs
            assert pattern(pipe) == "#...#..."[: 5 if aborted else 8]


# bare denoisers


@pytest.mark.parametrize(
    "times",
    [
        [torch.tensor(float(time)) for time in (9, 7, 4, 2)],
        [torch.tensor(float(time)) for time in (1, 2, 5, 9)],
        [torch.tensor([float(time)]) for time in (9, 7, 4, 2)],
        [float(time) for time in (9, 7, 4, 2)],
        [9, 7, 4, 2],
        [torch.tensor([[0.0, 0.0, time, time]]) for time in (0.9, 0.7, 0.4, 0.2)],
        [torch.tensor([time], dtype=torch.bfloat16) for time in (0.9, 0.7, 0.4, 0.2)],
    ],
    ids=["falling", "rising", "batched", "floats", "ints", "per token", "bfloat16"],
)
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_bare_loops(times: list[Any], calls: int) -> None:
    model = Stack(3)
    conditions = [{"encoder_hidden_states": prompt(seed)} for seed in range(calls)]
    with ck.cached(model, ScriptedConfig(computed=(0, 2))):
        for run in range(3):
            bare_loop(model, times=times, conditions=conditions)
            stats = ck.stats(model)
            assert stats.denoisers[""].runs == run + 1
            assert len(stats.last.branches) == calls
            for branch in stats.last.branches:
                assert steps_of(model, branch) == [0, 1, 2, 3]
                assert pattern(model, branch) == "#.#."


@pytest.mark.parametrize("calls", [1, 2])
def test_bare_loop_with_repeated_timesteps(calls: int) -> None:
    """Heun by hand: every timestep but the first comes twice."""
    times = [torch.tensor(float(time)) for time in (9, 7, 7, 4, 4, 2, 2)]
    conditions = [{"encoder_hidden_states": prompt(seed)} for seed in range(calls)]
    model = Stack(3)
    with ck.cached(model, NEVER):
        for run in range(2):
            bare_loop(model, times=times, conditions=conditions)
            assert ck.stats(model).denoisers[""].runs == run + 1
            for branch in ck.stats(model).last.branches:
                assert steps_of(model, branch) == list(range(7))


def test_bare_loop_of_one_step_repeated_with_another_prompt() -> None:
    model = Stack(3)
    with ck.cached(model, ScriptedConfig(computed=())):
        first = bare_loop(model, 1, conditions=[{"encoder_hidden_states": prompt(1)}])
        other = bare_loop(model, 1, conditions=[{"encoder_hidden_states": prompt(2)}])
    assert torch.equal(first[0], bare_loop(model, 1, conditions=[{"encoder_hidden_states": prompt(1)}])[0])
    assert torch.equal(other[0], bare_loop(model, 1, conditions=[{"encoder_hidden_states": prompt(2)}])[0])


# what is read back from the device

FREE = {
    "magcache": ck.MagCacheConfig(mag_ratios=[1.01] * 8, retention_ratio=0.1),
    "taylorseer": ck.TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=1),
}


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("config", FREE.values(), ids=FREE)
def test_no_read_back_through_a_pipeline(config: Any, calls: int) -> None:
    conditions = [{"encoder_hidden_states": prompt(seed)} for seed in range(calls)]
    pipe = toy_pipeline()
    with ck.cached(pipe, config):
        counts = SyncsPerCall(pipe, "transformer")(lambda: pipe(8, conditions=conditions))
        assert "." in pattern(pipe)
        assert sum(decision.syncs for decision in ck.stats(pipe).last.decisions[calls:]) == 0
        pipe(8, conditions=conditions)
        assert ck.stats(pipe).host_syncs == 0
    # The layout is learnt in the first call of a branch, and the scheduler's list is copied once a run.
    assert sum(counts[2 * calls :]) == 0


@pytest.mark.parametrize("calls", [1, 2])
def test_one_read_back_per_decision_of_first_block(calls: int) -> None:
    conditions = [{"encoder_hidden_states": prompt(seed)} for seed in range(calls)]
    pipe = toy_pipeline(change=of_time(torch.cos))
    with ck.cached(pipe, ALWAYS):
        counts = SyncsPerCall(pipe, "transformer")(lambda: pipe(8, conditions=conditions))
        assert [decision.syncs for decision in ck.stats(pipe).last.decisions][calls:] == [1] * 7 * calls
    assert counts[2 * calls :] == [1] * 6 * calls


@pytest.mark.parametrize("name", [name for name in TINY if "controlnet" not in name])
@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_no_read_back_through_real_pipelines(name: str) -> None:
    tiny = TINY[name]
    pipe = tiny.build()
    with ck.cached(pipe, FREE["taylorseer"]):
        tiny.call(pipe, steps=5)  # learns the layouts, which reads some similarities back
        tiny.call(pipe, steps=5)
        stats = ck.stats(pipe)
        assert "." in pattern(pipe)
        for item in stats.denoisers.values():
            assert item.last.source == "scheduler"
            for branch in item.last.branches:
                steps = [decision.step for decision in item.last.of(branch)]
                assert steps == list(range(steps[0], steps[0] + len(steps)))
        assert stats.host_syncs == 0


def test_syncs_of_a_bare_loop_are_counted() -> None:
    model = Stack(3)
    with ck.cached(model, FREE["taylorseer"]):
        bare_loop(model, x=latents())
        assert ck.stats(model).host_syncs >= 8
