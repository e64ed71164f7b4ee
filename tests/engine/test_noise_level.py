"""The noise level of a step is on one scale, whatever scale and direction the timesteps of a run have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler

import cachekit as ck
from cachekit.engine.clock import BareClock, View, noise_levels
from cachekit.engine.rules import GateContext, Guards, Rule, StackSpec, Verdict
from cachekit.strategies.base import CacheConfig, config_class, strategy
from cachekit.strategies.predictors import Reuse

from ..pipelines.tiny import TINY
from ..toys import Stack, ToyPipeline, bare_loop
from .test_clock import NAMES, scheduler

SEEN: list[View] = []


@config_class
class WatchConfig(CacheConfig):
    """Test strategy: computes and notes where it is."""


class _Watch:
    def attend(self, context: GateContext) -> None:
        SEEN.append(context.now)

    def decide(self, context: GateContext) -> Verdict:
        SEEN.append(context.now)
        return Verdict(False, reason="watching")


@strategy("watch-level", WatchConfig)
def watch(config: WatchConfig, denoiser: Any) -> list[Rule]:
    return [Rule(StackSpec(), _Watch(), Reuse(), Guards(warmup=0))]


def levels() -> list[float]:
    """Of the steps seen since the last call, one each."""
    found = {view.step: view.level for view in SEEN}
    SEEN.clear()
    assert all(level is not None for level in found.values())
    return list(found.values())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_every_scheduler_goes_from_noise_to_clean(name: str) -> None:
    pipe = ToyPipeline(Stack(2), scheduler(name))
    with ck.cached(pipe, WatchConfig()):
        pipe(8)
    found = levels()
    assert 850 < found[0] <= 1000
    assert 0 <= found[-1] < 350
    assert found == sorted(found, reverse=True)


def test_logarithms_of_sigma_are_told_by_sigma() -> None:
    """Stable Video Diffusion's timesteps are log(sigma) / 4."""
    euler = EulerDiscreteScheduler(
        timestep_type="continuous",
        prediction_type="v_prediction",
        use_karras_sigmas=True,
        sigma_max=700,
        sigma_min=0.002,
    )
    pipe = ToyPipeline(Stack(2), euler)
    with ck.cached(pipe, WatchConfig()):
        pipe(6)
    sigmas = euler.sigmas[:-1]
    assert float(euler.timesteps.min()) < 0
    assert levels() == pytest.approx((1000 * sigmas / (1 + sigmas)).tolist(), rel=1e-4)


def test_flow_matching_with_a_shift_counts_its_sigma() -> None:
    pipe = ToyPipeline(Stack(2), FlowMatchEulerDiscreteScheduler(shift=3.0))
    with ck.cached(pipe, WatchConfig()):
        pipe(6)
    assert levels() == pytest.approx((1000 * pipe.scheduler.sigmas[:-1]).tolist(), rel=1e-4)


@pytest.mark.parametrize("name", ["mochi", "lumina2", "z-image", "flux", "wan", "sd15", "sana"])
@pytest.mark.filterwarnings("ignore")
def test_pipelines_that_rise_or_divide(name: str) -> None:
    """Mochi's scheduler rises; Lumina 2, Z-Image and Flux hand the model another scale than the scheduler has."""
    pipe = TINY[name].build()
    with ck.cached(pipe, WatchConfig()):
        TINY[name].call(pipe, steps=6)
    found = levels()
    assert found[0] > 800
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([981.0, 661.0, 341.0, 21.0], [981, 661, 341, 21]),
        ([0.75, 0.5, 0.25, 0.125], [750, 500, 250, 125]),
        ([0.25, 0.5, 0.75, 1.0], [500, 250, 0]),
        ([0.0, 250.0, 500.0], [750, 500]),
        ([1000.0, 1.0, 0.5], [1000, 1, 0.5]),
    ],
)
def test_bare_denoiser(times: list[float], expected: list[float]) -> None:
    """Where timesteps rise, the direction is known from the second step on."""
    with ck.cached(model := Stack(2), WatchConfig()):
        bare_loop(model, times=[torch.tensor(time) for time in times])
    assert levels()[-len(expected) :] == expected


def test_levels_that_cannot_be_told() -> None:
    clock = BareClock()
    assert clock.read(None, None).level is None
    assert clock.read(-0.5, None).level is None
    assert BareClock().read(80_000.0, None).level is None
    assert noise_levels([1.57, 0.8], [], {}) == []


def test_a_new_bare_run_forgets_the_scale() -> None:
    clock = BareClock()
    assert clock.read(900.0, None).level == 900
    clock.abort()
    assert clock.read(0.9, None).level == 900
