"""Runs whose schedule is not simply `num_inference_steps` long: second-order samplers, img2img, two experts; and the
magnitude ratios that such runs calibrate.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

import cachekit as ck

from .families import unet
from .runs import STEPS, STRATEGIES, TWO_STEPS, always, arguments, branches, built, entries, names, never, ratios
from .tiny import TINY

pytestmark = [
    pytest.mark.filterwarnings("ignore::cachekit.CacheWarning"),
    pytest.mark.xdist_group("schedules"),  # shares built pipelines and runs
]
SAMPLERS = {"ddim": STEPS, "euler": STEPS, "pndm": STEPS + 1, "heun": 2 * STEPS - 1}
"""Entries of the schedule: PNDM runs one twice, Heun all but the last."""
STRENGTHS = {0.25: 2, 0.5: 4, 1.0: 8}


@cache
def sampled(sampler: str) -> tuple[DiffusionPipeline, Tensor]:
    """Stable Diffusion 1.5 with another sampler, and its uncached output."""
    pipe = unet.scheduler(TINY["sd15"].build(), sampler)
    return pipe, TINY["sd15"].call(pipe, steps=STEPS)


def check(name: str, pipe: DiffusionPipeline, base: Tensor, strategy: str, count: int, **options: Any) -> ck.RunStats:
    """One run that never skips and two that always do; the statistics of the last one."""
    tiny, curve = TINY[name], [1.01] * count
    with ck.cached(pipe, never(name, strategy, curve)) as handle:
        assert torch.equal(tiny.call(pipe, steps=STEPS, **options), base)
        assert handle.stats().computed == handle.stats().calls == count
    with ck.cached(pipe, always(name, strategy, curve)) as handle:
        output = tiny.call(pipe, steps=STEPS, **options)
        assert torch.isfinite(output).all()
        assert torch.equal(tiny.call(pipe, steps=STEPS, **options), output)
        stats = handle.stats()
    last = stats.last
    assert last.steps == last.calls == count
    assert [decision.step for decision in last.decisions] == list(range(count))
    assert stats.bytes_held == 0
    assert torch.equal(output, base) == (last.reused == 0)
    return last


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("sampler", "count"), SAMPLERS.items())
def test_samplers(sampler: str, count: int, strategy: str) -> None:
    pipe, base = sampled(sampler)
    last = check("sd15", pipe, base, strategy, count)
    assert len(pipe.scheduler.timesteps) == count
    if strategy == "first_block":
        assert last.computed_steps() == (0,)
    elif strategy.startswith("taylorseer"):
        assert last.computed_steps() == (0, 1, *range(2, count, 3))
    else:
        assert last.reused >= (count - round(0.2 * count)) // 2


@pytest.mark.parametrize(("sampler", "count"), SAMPLERS.items())
def test_ratios_of_samplers(sampler: str, count: int) -> None:
    """A ratio per call; a run with them skips, and so does a run at another number of steps."""
    tiny, (pipe, _) = TINY["sd15"], sampled(sampler)
    measured = ck.calibrate_magnitudes(pipe, "a cat", STEPS, **arguments(tiny))
    assert [len(curve) for curve in measured.ratios.values()] == [measured.steps] == [count]
    with ck.cached(pipe, ck.MagCacheConfig(threshold=1e9, mag_ratios=measured)):
        for steps in (STEPS, STEPS + 4):
            tiny.call(pipe, steps=steps)
            last = ck.stats(pipe).last
            assert last.steps == last.calls == len(pipe.scheduler.timesteps)
            assert last.reused > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("strength", "count"), STRENGTHS.items())
def test_img2img_counts_the_executed_steps(strength: float, count: int, strategy: str) -> None:
    name, options = "flux-img2img", {"guidance": False, "strength": strength}
    base = TINY[name].call(built(name), steps=STEPS, **options)
    last = check(name, built(name), base, strategy, count, **options)
    computed = {"first_block": 1, "magcache": max(round(0.2 * count), 1) + (count > 4)}.get(
        strategy, len({0, 1, *range(2, count, 3)} & set(range(count)))
    )
    assert last.computed == computed, last


@pytest.mark.parametrize("count", STRENGTHS.values())
def test_ratios_of_img2img(count: int) -> None:
    name, pipe = "flux-img2img", built("flux-img2img")
    options = arguments(TINY[name], guidance=False, strength=count / STEPS)
    measured = ck.calibrate_magnitudes(pipe, "a cat", STEPS, **options)
    assert {branch: len(curve) for branch, curve in measured.ratios.items()} == {"cond": count}


@pytest.mark.parametrize("name", names())
def test_ratios_count_the_steps(name: str) -> None:
    """Also joined over the two experts of Wan 2.2."""
    curves = ratios(name)
    assert len(curves) == branches(name, True)
    for curve in curves.values():
        assert len(curve) == entries(name)
        assert curve[0] == 1.0
        assert all(0.2 < ratio < 5 for ratio in curve)
        assert len(set(curve)) > entries(name) // 2


@pytest.mark.parametrize("name", TWO_STEPS)
def test_both_ways_of_calibrating_agree(name: str) -> None:
    measured = ck.calibrate_magnitudes(built(name), "a cat", STEPS, **arguments(TINY[name]))
    assert not ck.is_cache_enabled(built(name))
    assert measured.ratios.keys() == ratios(name).keys()
    for branch, curve in measured.ratios.items():
        assert curve == pytest.approx(ratios(name)[branch])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_expert_starts_from_its_own_history(strategy: str) -> None:
    """The second expert computes when it takes over, in each branch, and the steps go on counting."""
    name = "wan-two-experts"
    pipe = built(name)
    with ck.cached(pipe, always(name, strategy)) as handle:
        TINY[name].call(pipe, steps=STEPS)
        stats = handle.stats()
    high, low = (stats.denoisers[part].last for part in TINY[name].denoisers)
    for branch in ("cond", "uncond"):
        before, after = high.of(branch), low.of(branch)
        assert [decision.step for decision in (*before, *after)] == list(range(STEPS))
        assert not before[0].reused
        assert not after[0].reused
        assert any(decision.reused for decision in before)
        assert any(decision.reused for decision in after)
