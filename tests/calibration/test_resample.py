"""A profile at another number of steps."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, HeunDiscreteScheduler

import cachekit as ck
from cachekit.calibration.influence import influences
from cachekit.calibration.resample import interpolation
from cachekit.calibration.runs import Batch
from cachekit.calibration.search import spread
from cachekit.calibration.surrogate import gram_matrix

from .support import PROMPTS, calibrated, mixture

OTHERS = ("one", "two", "three", "four")


@pytest.fixture(scope="module")
def profile() -> ck.Profile:
    return calibrated(mixture(), steps=16)


def test_interpolation_is_exact_on_cubics_and_sums_to_one() -> None:
    places = [0.0, 0.3, 1.0, 4.5, 8.0, 8.7]
    matrix = interpolation(9, places)
    np.testing.assert_allclose(matrix.sum(1), 1)
    steps = np.arange(9.0)
    for power in range(4):
        np.testing.assert_allclose(matrix @ steps**power, np.array(places) ** power, atol=1e-9)
    np.testing.assert_allclose(interpolation(2, [0.5]), [[0.5, 0.5]])
    np.testing.assert_array_equal(interpolation(9, range(9)), np.eye(9))


@pytest.mark.parametrize("steps", [10, 16, 27])
def test_what_is_read_off_is_what_a_run_measures(profile: ck.Profile, steps: int) -> None:
    there = profile.resampled(steps, computed_steps=5)
    batch = Batch(mixture(), PROMPTS[:4], steps, 0, {}, 3)
    batch.run_uncached()
    real = gram_matrix(batch.reference)
    assert np.abs(there.gram.numpy() - real).max() < 0.25 * np.abs(real).max()
    assert there.influence.sum() == pytest.approx(sum(influences(batch.reference)), rel=1e-3)
    assert there.sigmas == pytest.approx(batch.measurements.sigmas, abs=0.02)
    assert there.steps == there.num_inference_steps == len(there.latent_drift) == len(there.seconds) == steps


def test_resampling_to_the_same_number_changes_no_measurement(profile: ck.Profile) -> None:
    same = profile.resampled(16, computed_steps=6)
    torch.testing.assert_close(same.gram, profile.gram)
    torch.testing.assert_close(same.influence, profile.influence)
    assert same.latent_drift == pytest.approx(profile.latent_drift)


@pytest.mark.parametrize("steps", [11, 24])
@pytest.mark.parametrize("kind", ["flow", "euler", "ddim"])
def test_used_at_another_number_of_steps_it_beats_doing_without(kind: str, steps: int) -> None:
    schedulers = {"flow": None, "euler": EulerDiscreteScheduler(), "ddim": DDIMScheduler(clip_sample=False)}
    pipe = mixture(schedulers[kind])
    made = calibrated(pipe, steps=16)
    with pytest.warns(ck.CacheWarning, match=f"a profile of 16 steps is used at {steps}"):
        config = ck.ScheduleCacheConfig.from_profile(made, speedup=2, num_inference_steps=steps)
    count = -(-steps // 2)
    assert len(config.computed_steps[""]) == count

    def run(given: ck.ScheduleCacheConfig | None) -> torch.Tensor:
        generators = [torch.Generator().manual_seed(50 + index) for index in range(len(OTHERS))]
        if given is None:
            return pipe(OTHERS, steps, generators, "latent")[0]  # type: ignore[no-any-return]
        with ck.cached(pipe, given):
            result = pipe(OTHERS, steps, generators, "latent")[0]
            assert ck.stats(pipe).last.computed_steps() == tuple(given.computed_steps[""])
        return result  # type: ignore[no-any-return]

    base = run(None)
    without = ck.ScheduleCacheConfig(spread(steps, count))
    assert (run(config) - base).pow(2).mean() < (run(without) - base).pow(2).mean()


def test_coefficients_sum_to_one_and_are_used(profile: ck.Profile) -> None:
    point = profile.resampled(20, computed_steps=8).front[0]
    assert set(point.rows) == set(range(20)) - set(point.computed_steps)
    for used, weights in point.rows.values():
        assert sum(weights) == pytest.approx(1)
        assert set(used) <= set(point.computed_steps)


def test_the_same_number_needs_no_estimate(profile: ck.Profile) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = ck.ScheduleCacheConfig.from_profile(profile, computed_steps=6, num_inference_steps=16)
    assert config.computed_steps[""] == profile.front[1].computed_steps


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"num_inference_steps": 40, "speedup": 2}, "serves 8 to 32 steps, not 40; calibrate"),
        ({"num_inference_steps": 4, "speedup": 2}, "serves 8 to 32 steps, not 4"),
        ({"num_inference_steps": 20, "min_psnr": 30}, "min_psnr was measured at 16 steps"),
        ({"num_inference_steps": 20}, "exactly one"),
        ({"num_inference_steps": 20, "speedup": 2, "computed_steps": 3}, "exactly one"),
        ({"num_inference_steps": 20, "speedup": 0.5}, "at least 1"),
        ({"num_inference_steps": 20, "computed_steps": 21}, "from 1 to 20"),
        ({"num_inference_steps": 20, "computed_steps": 0}, "from 1 to 20"),
        ({"num_inference_steps": 20.5, "speedup": 2}, "whole number"),
        ({"num_inference_steps": -1, "speedup": 2}, "whole number"),
    ],
    ids=str,
)
def test_what_cannot_be_asked(profile: ck.Profile, budget: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ck.ScheduleCacheConfig.from_profile(profile, **budget)


def test_schedules_that_cannot_be_moved(profile: ck.Profile) -> None:
    heun = calibrated(mixture(HeunDiscreteScheduler()), steps=8, budgets=[6], evaluations=0)
    assert heun.steps == 15
    with pytest.raises(ValueError, match="15 steps of 8, or repeats noise levels"):
        heun.resampled(12, computed_steps=6)
    with pytest.raises(ValueError, match="take turns"):
        replace(profile, starts=(0, 5)).resampled(12, computed_steps=6)
