"""Noise levels: every scheduler of diffusers in one unit, and timesteps where there is no scheduler."""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)

from cachekit.engine.clock import BareClock, SchedulerClock
from cachekit.engine.noise import TimeScale, noise_levels

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning", "ignore::FutureWarning")
STEPS = 6

# Tokens instead of a signal with noise.
DISCRETE = {
    "AmusedScheduler",
    "BlockRefinementScheduler",
    "DiscreteDDIMScheduler",
    "EntropyBoundScheduler",
    "VQDiffusionScheduler",
}
NEEDS = {
    "CosineDPMSolverMultistepScheduler": "torchsde",
    "DPMSolverSDEScheduler": "torchsde",
    "LMSDiscreteScheduler": "scipy",
}
ARGUMENTS = {
    "RFD4ProteinaScheduler": {
        "schedule_mode": "power",
        "noise_mode": "tan",
        "tsr_k": 1.0,
        "tsr_sigma": 1.0,
        "tail_steps": 0,
    },
    "HeliosScheduler": {"stages": 1},
    "HeliosDMDScheduler": {"stages": 1},
}


def share(signal: float, noise: float) -> float:
    return noise / (signal + noise)


def by_cumprod(scheduler: Any, index: int) -> float:
    bar = float(scheduler.alphas_cumprod[int(scheduler.timesteps[index])])
    return share(math.sqrt(bar), math.sqrt(1 - bar))


def by_sigma(scheduler: Any, index: int) -> float:
    return float(scheduler.sigmas[index])


def between_sigmas(scheduler: Any, index: int) -> float:
    """The level of a timestep between two training steps, from its logarithm as the scheduler has it."""
    logs = ((1 - scheduler.alphas_cumprod) / scheduler.alphas_cumprod).sqrt().log().tolist()
    timestep = float(scheduler.timesteps[index])
    low = min(int(timestep), len(logs) - 2)
    return share(1.0, math.exp(logs[low] + (logs[low + 1] - logs[low]) * (timestep - low)))


# Schedulers that cannot add noise to a clean sample at one of their entries: their definition, written down here.
BY_HAND: dict[str, Callable[[Any, int], float]] = {
    "DDIMInverseScheduler": by_cumprod,
    "RePaintScheduler": by_cumprod,
    "KDPM2DiscreteScheduler": between_sigmas,
    "KDPM2AncestralDiscreteScheduler": between_sigmas,
    "FlowMatchHeunDiscreteScheduler": by_sigma,
    "LTXEulerAncestralRFScheduler": by_sigma,
    "PiflowScheduler": by_sigma,
    "HeliosScheduler": by_sigma,
    "HeliosDMDScheduler": by_sigma,
    "IPNDMScheduler": lambda scheduler, index: share(float(scheduler.alphas[index]), float(scheduler.betas[index])),
    "KarrasVeScheduler": lambda scheduler, index: share(1.0, float(scheduler.schedule[STEPS - 1 - index])),
    "ScoreSdeVeScheduler": lambda scheduler, index: share(1.0, float(scheduler.sigmas[index])),
    "SCMScheduler": lambda scheduler, index: share(
        math.cos(float(scheduler.timesteps[index])), math.sin(float(scheduler.timesteps[index]))
    ),
}
NAMES = [
    name
    for name in sorted(dir(diffusers))
    if name.endswith("Scheduler") and not name.startswith("Flax") and name not in DISCRETE
]


def prepared(name: str) -> Any:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    cls = getattr(diffusers, name)
    known = inspect.signature(cls.__init__).parameters
    scheduler = cls(**ARGUMENTS.get(name, {}), **({"skip_prk_steps": True} if "skip_prk_steps" in known else {}))
    scheduler.set_timesteps(2 if name == "SCMScheduler" else STEPS)
    if hasattr(scheduler, "set_sigmas"):
        scheduler.set_sigmas(STEPS)
    return scheduler


def by_adding_noise(scheduler: Any, index: int) -> float:
    """What the scheduler makes of a clean sample of one without noise, and of nothing with noise of one."""
    one, zero, timestep = torch.ones(1, 1, 1), torch.zeros(1, 1, 1), scheduler.timesteps[index][None]
    if hasattr(scheduler, "scale_noise"):
        signal, noise = scheduler.scale_noise(one, timestep, zero), scheduler.scale_noise(zero, timestep, one)
    else:
        signal, noise = scheduler.add_noise(one, zero, timestep), scheduler.add_noise(zero, one, timestep)
    unit = getattr(scheduler.config, "sigma_data", None) or 1.0
    return share(unit * float(signal.flatten()[0]), float(noise.flatten()[0]))


@pytest.mark.parametrize("name", NAMES)
def test_every_scheduler(name: str) -> None:
    scheduler = prepared(name)
    levels = noise_levels(scheduler, scheduler.timesteps.float().tolist())
    assert len(levels.values) == len(scheduler.timesteps)
    expected = BY_HAND.get(name, by_adding_noise)
    indices = range(len(scheduler.timesteps))
    assert levels.values == pytest.approx([expected(scheduler, index) for index in indices], abs=2e-3)
    assert max(levels.values) - min(levels.values) > 0.1, "the noise changes over a run"


@pytest.mark.parametrize("cls", [UniPCMultistepScheduler, DPMSolverMultistepScheduler])
def test_solvers_on_flow_sigmas(cls: Any) -> None:
    scheduler = cls(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0)
    scheduler.set_timesteps(STEPS)
    levels = noise_levels(scheduler, scheduler.timesteps.tolist())
    assert levels.values == pytest.approx(scheduler.sigmas[:STEPS].tolist())
    assert levels.source == "the scheduler's sigmas"


def test_all_ways_to_the_same_ratio_agree() -> None:
    """The timestep 500 of one training schedule: from alphas_cumprod, and from sigmas that are ratios."""
    cumprod, ratios = DDIMScheduler(), EulerDiscreteScheduler()
    found = []
    for scheduler in (cumprod, ratios):
        scheduler.set_timesteps(1000)
        place = scheduler.timesteps.tolist().index(500)
        found.append(noise_levels(scheduler, scheduler.timesteps.float().tolist()).values[place])
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    karras = EulerDiscreteScheduler(use_karras_sigmas=True, timestep_type="continuous", prediction_type="v_prediction")
    karras.set_timesteps(STEPS)
    expected = [share(1.0, sigma) for sigma in karras.sigmas[:STEPS].tolist()]
    assert noise_levels(karras, karras.timesteps.tolist()).values == pytest.approx(expected)


def test_flow_matching_with_sigmas_above_one_is_a_ratio() -> None:
    """Cosmos 2 hands sigmas up to 80 to the flow-matching scheduler and feeds sigma / (sigma + 1)."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=[80.0, 4.0, 1.0, 0.25])
    levels = noise_levels(scheduler, scheduler.timesteps.tolist()).values
    assert levels == pytest.approx([80 / 81, 0.8, 0.5, 0.2])


def test_no_signal_at_all_is_pure_noise() -> None:
    scheduler = DDIMScheduler(rescale_betas_zero_snr=True, timestep_spacing="trailing")
    scheduler.set_timesteps(4)
    assert noise_levels(scheduler, scheduler.timesteps.float().tolist()).values[0] == 1.0


def test_a_scheduler_of_several_stages_counts_over_all_of_them() -> None:
    scheduler = SimpleNamespace(sigmas=torch.tensor([1.0, 0.5, 0.0]), sigmas_per_stage={1: torch.ones(2)})
    assert noise_levels(scheduler, [600.0, 450.0]).values == pytest.approx([0.6, 0.45])


@pytest.mark.parametrize(
    ("timesteps", "levels"),
    [
        ([1000.0, 500.0, 1.0], [1.0, 0.5, 0.001]),
        ([1.0, 0.5, 0.25], [1.0, 0.5, 0.25]),
        ([0.0, 0.5, 1.0], [1.0, 0.5, 0.0]),
        ([0.0, 250.0, 1000.0], [1.0, 0.75, 0.0]),
        ([0.3], [0.3]),
    ],
    ids=["falling, thousand", "falling, one", "rising, one", "rising, thousand", "one entry"],
)
def test_an_unknown_scheduler_is_read_by_its_timesteps(timesteps: list[float], levels: list[float]) -> None:
    found = noise_levels(SimpleNamespace(), timesteps)
    assert found.values == pytest.approx(levels)
    assert found.source == "the scheduler's timesteps"


@pytest.mark.parametrize(
    "broken",
    [
        SimpleNamespace(sigmas=torch.tensor([math.nan, 0.5])),
        SimpleNamespace(sigmas=torch.ones(1)),
        SimpleNamespace(sigmas=torch.ones(2, 2)),
        SimpleNamespace(alphas_cumprod=torch.ones(3)),
        SimpleNamespace(sigmas=[1.0, 0.5]),
    ],
    ids=["nan", "too short", "two dimensions", "timesteps outside", "no tensor"],
)
def test_what_cannot_be_read_is_not_used(broken: Any) -> None:
    assert noise_levels(broken, [900.0, 100.0]).values == pytest.approx([0.9, 0.1])


def test_the_view_has_the_level_of_its_entry() -> None:
    scheduler, clock = DDIMScheduler(), SchedulerClock()
    scheduler.set_timesteps(STEPS)
    expected = noise_levels(scheduler, scheduler.timesteps.float().tolist()).values
    for index, timestep in enumerate(scheduler.timesteps):
        view = clock.read(scheduler, timestep, None)
        assert view is not None
        assert view.noise == expected[index]
        assert view.noise_source == "the scheduler's alphas_cumprod"


def test_a_bare_clock_scales_by_the_largest_timestep_and_the_direction() -> None:
    for values, expected in (
        ([900.0, 500.0, 0.5], [0.9, 0.5, 0.0005]),
        ([0.9, 0.5, 0.1], [0.9, 0.5, 0.1]),
        ([0.0, 0.5, 1.0], [1.0, 0.5, 0.0]),
        ([1.0, 400.0, 900.0], [0.999, 0.6, 0.1]),
    ):
        clock = BareClock()
        views = [clock.read(value, None) for value in values]
        assert views[0].scale is None, "one timestep has no direction"
        last = views[-1].scale
        assert last is not None
        assert [last.noise(value) for value in values] == pytest.approx(expected)
        assert all(view.noise is None for view in views)


def test_a_bare_clock_forgets_the_scale_with_the_run() -> None:
    clock = BareClock()
    for value in (900.0, 500.0, 100.0):
        clock.read(value, None)
    view = clock.read(0.2, None)
    clock.read(0.1, None)
    clock.abort()
    assert clock.read(0.9, None).scale is None
    assert clock.read(0.8, None).scale == TimeScale(0.9, rising=False)
    assert view.run == 0
