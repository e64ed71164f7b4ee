"""Real pipelines end to end under every strategy, with and without guidance: exact where nothing is skipped, equal runs
stay equal whatever ran in between, and disabling restores.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

import cachekit as ck

from .runs import (
    CONTROLLED,
    STEPS,
    STRATEGIES,
    TWO_CALLS,
    AbortError,
    always,
    branches,
    built,
    counted,
    entries,
    names,
    never,
    read_backs,
    record,
    uncached,
)
from .tiny import TINY

pytestmark = [
    pytest.mark.filterwarnings("ignore::cachekit.CacheWarning"),
    pytest.mark.xdist_group("cached"),  # shares built pipelines and runs
]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
every_guidance = pytest.mark.parametrize("guidance", [True, False], ids=["guided", "unguided"])
ERRATIC = "flux2-klein"
"""With these random weights the difference of the two branches turns by 90 degrees from step to step (measured on the
uncached run), so no prediction can keep the effect of guidance."""
UNINTERRUPTED = ("aura-flow", "lumina2", "pixart-alpha", "pixart-sigma")
"""Pipelines that do not look at `_interrupt`."""
SCHEDULE_COPIES = ("cachekit.engine.clock: tolist", "cachekit.engine.noise: tolist")
"""The timesteps, sigmas and noise levels of a run, copied once."""
STOP = 2
"""The step after which a run is aborted."""


def abort(_: DiffusionPipeline, index: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
    if index == STOP:
        raise AbortError
    return values


def interrupt(pipe: DiffusionPipeline, index: int, _: Any, values: dict[str, Any]) -> dict[str, Any]:
    if index == STOP:
        pipe._interrupt = True
    return values


@pytest.mark.parametrize(
    ("strategy", "guidance"),
    [*((strategy, True) for strategy in STRATEGIES), ("first_block", False), ("taylorseer-attention", False)],
)
@pytest.mark.parametrize("name", names())
def test_never_skipping_changes_no_bit(name: str, strategy: str, guidance: bool) -> None:
    base = uncached(name, guidance)
    with ck.cached(built(name), never(name, strategy)) as handle:
        output = TINY[name].call(built(name), steps=STEPS, guidance=guidance)
        stats = handle.stats()
    assert stats.reused == 0
    assert torch.equal(output, base)
    if strategy == "first_block":
        scores = [d.score for item in stats.denoisers.values() for d in item.last.decisions if d.score is not None]
        assert min(scores) > 0, "the probe does not see that the latents move"


@every_guidance
@every_strategy
@pytest.mark.parametrize("name", names())
def test_always_skipping_reuses_and_repeats(name: str, strategy: str, guidance: bool) -> None:
    run = record(name, strategy, guidance)
    for part in TINY[name].denoisers:
        assert run.stats.denoisers[part].last.reused > 0, str(run.stats)
    assert run.output.shape == uncached(name, guidance).shape
    assert torch.isfinite(run.output).all()
    assert not torch.equal(run.output, uncached(name, guidance))
    if guidance:
        assert torch.equal(run.again, run.output)


@every_strategy
@pytest.mark.parametrize("name", names())
def test_an_aborted_run_and_other_runs_do_not_leak(name: str, strategy: str) -> None:
    tiny, pipe = TINY[name], built(name)
    base, clean = uncached(name, True), record(name, strategy, True)
    with ck.cached(pipe, always(name, strategy)):
        with counted(name) as calls, pytest.raises(AbortError):
            tiny.call(pipe, steps=STEPS, callback=abort)
        assert calls.total() == (STOP + 1) * branches(name, True)
        assert torch.equal(tiny.call(pipe, steps=STEPS), clean.output)
        tiny.call(pipe, steps=4, prompt="a red car", size=1, batch=2, guidance=False)
        assert torch.equal(tiny.call(pipe, steps=STEPS), clean.output)
        assert ck.stats(pipe).reused == clean.stats.reused
    assert torch.equal(tiny.call(pipe, steps=STEPS), base)


@pytest.mark.parametrize("strategy", ["first_block", "taylorseer"])
@pytest.mark.parametrize("name", names(*(name for name in TINY if name not in UNINTERRUPTED)))
def test_an_interrupted_run_does_not_leak(name: str, strategy: str) -> None:
    tiny, pipe = TINY[name], built(name)
    clean = record(name, strategy, False)
    with ck.cached(pipe, always(name, strategy)):
        with counted(name) as calls:
            tiny.call(pipe, steps=STEPS, guidance=False, callback=interrupt)
        assert calls.total() == STOP + 1
        assert torch.equal(tiny.call(pipe, steps=STEPS, guidance=False), clean.output)
        assert ck.stats(pipe).reused == clean.stats.reused


@every_guidance
@every_strategy
@pytest.mark.parametrize("name", names())
def test_statistics_tell_what_happened(name: str, strategy: str, guidance: bool) -> None:
    run = record(name, strategy, guidance)
    assert run.stats.calls == run.calls.total() == entries(name) * branches(name, guidance)
    assert run.stats.bytes_held == 0
    assert run.stats.peak_bytes > 0
    steps: dict[str, list[int]] = {}
    for part, item in run.stats.denoisers.items():
        assert item.last.calls == run.calls[part]
        assert item.last.steps == entries(name)
        assert item.last.source == "scheduler"
        assert all(decision.reason for decision in item.last.decisions)
        for branch in item.last.branches:
            steps.setdefault(branch, []).extend(decision.step for decision in item.last.of(branch))
    assert len(steps) == branches(name, guidance)
    assert all(taken == list(range(entries(name))) for taken in steps.values()), steps


@pytest.mark.parametrize("strategy", ["taylorseer", "taylorseer-attention"])
@pytest.mark.parametrize("name", names(*TWO_CALLS))
def test_both_branches_have_one_pattern(name: str, strategy: str) -> None:
    run = record(name, strategy, True)
    for part in TINY[name].denoisers:
        last = run.stats.denoisers[part].last
        assert last.branches == ("cond", "uncond")
        cond, uncond = ([decision.reused for decision in last.of(branch)] for branch in last.branches)
        assert cond == uncond
        assert True in cond


@every_strategy
@pytest.mark.parametrize("name", names())
def test_host_syncs(name: str, strategy: str) -> None:
    """None for strategies that do not look at values, one for each decision of those that do; and none untold.

    The schedule is copied once a run, and learning the layout reads values in the first computed call after enabling.
    Control residuals are compared by value, so pipelines with a control net may read more.
    """
    run = record(name, strategy, True)
    copies = [read for read in run.reads if read in SCHEDULE_COPIES]
    assert len(copies) <= 3
    assert run.stats_again.host_syncs == len(run.reads) - len(copies), run.reads
    if name in CONTROLLED:
        return
    for item in run.stats_again.denoisers.values():
        asked = [strategy == "first_block" and decision.score is not None for decision in item.last.decisions]
        assert [decision.syncs for decision in item.last.decisions] == [int(one) for one in asked]
        assert any(asked) == (strategy == "first_block")
    for item in run.stats.denoisers.values():
        for branch in item.last.branches:
            first, *others = item.last.of(branch)
            assert not first.reused
            assert [d.syncs for d in others] == [int(strategy == "first_block") for _ in others]


def test_reads_while_the_layout_is_learned_are_told() -> None:
    pipe = built("flux")
    with ck.cached(pipe, always("flux", "taylorseer")) as handle, read_backs() as reads:
        TINY["flux"].call(pipe, steps=2)
        assert handle.stats().host_syncs == len([read for read in reads if read not in SCHEDULE_COPIES])


@pytest.mark.parametrize("strategy", ["taylorseer", "taylorseer-attention"])
@pytest.mark.parametrize("name", names(*(name for name in TWO_CALLS if name != ERRATIC)))
def test_guidance_survives(name: str, strategy: str) -> None:
    """What guidance does to the final latents points the same way and is as strong."""
    effect = uncached(name, True) - uncached(name, False)
    kept = record(name, strategy, True).output - record(name, strategy, False).output
    assert torch.cosine_similarity(effect.flatten(), kept.flatten(), dim=0) >= 0.9
    assert 0.8 < kept.norm() / effect.norm() < 1.25
