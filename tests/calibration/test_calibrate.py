"""Calibration on the trained pipeline: measured, saved, used again, refused where it does not fit."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import EulerDiscreteScheduler

import cachekit as ck
from cachekit import zoo
from cachekit.calibration.runs import Batch
from cachekit.calibration.search import spread

pytestmark = pytest.mark.xdist_group("calibration")

STEPS = 8
GUIDANCE: dict[str, Any] = {"negative_prompt": "", "true_cfg_scale": 3.0}


@pytest.fixture(scope="module")
def pipe() -> Any:
    loaded = zoo.load("emoji-flux")
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def profile(pipe: Any) -> ck.Profile:
    prompts = zoo.prompts("emoji-flux")[:8]
    return ck.calibrate(pipe, prompts, STEPS, budgets=[3, 5], evaluations=1, progress=False, **GUIDANCE)


def draw(pipe: Any, seed: int = 0, steps: int = STEPS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return pipe("red heart", num_inference_steps=steps, generator=generator, output_type="latent", **GUIDANCE).images


def test_what_a_profile_holds(profile: ck.Profile, pipe: Any) -> None:
    assert profile.steps == STEPS
    assert profile.samples == 6
    assert [len(point.computed_steps) for point in profile.front] == [3, 5]
    assert all(len(point.psnr) == 2 and min(point.psnr) > 10 for point in profile.front)
    assert profile.front[1].mean_psnr > profile.front[0].mean_psnr
    for point in profile.front:
        assert set(point.rows) == set(range(STEPS)) - set(point.computed_steps)
        for sources, weights in point.rows.values():
            assert sum(weights) == pytest.approx(1.0)
            assert set(sources) <= set(point.computed_steps)
    assert profile.influence.tolist() == pytest.approx(pipe.scheduler.sigmas.diff().tolist(), rel=1e-2)
    assert set(profile.magnitudes) == {"cond", "uncond"}
    assert "speed-up" in str(profile)


def test_the_pipeline_is_left_plain(profile: ck.Profile, pipe: Any) -> None:
    assert not ck.is_cache_enabled(pipe)
    assert "step" not in vars(pipe.scheduler)


def test_calibrated_beats_the_extrapolation_with_the_same_schedule(profile: ck.Profile, pipe: Any) -> None:
    """On its own calibration data, measured on the final latents."""
    batch = Batch(pipe, zoo.prompts("emoji-flux")[:3], STEPS, 0, GUIDANCE, depth=3)
    batch.run_uncached()
    for schedule in (spread(STEPS, 4), profile.front[1].computed_steps):
        fitted, taylor = batch.errors(schedule), batch.errors(schedule, fitted=False)
        assert fitted.mean() < taylor.mean()


def test_a_schedule_from_a_profile(profile: ck.Profile, pipe: Any) -> None:
    with ck.cached(pipe, ck.ScheduleCacheConfig.from_profile(profile, speedup=8 / 3)):
        draw(pipe)
        stats = ck.stats(pipe)
    assert stats.last.computed_steps() == profile.front[0].computed_steps
    assert stats.host_syncs == 0
    assert stats.peak_bytes <= 2 * 3 * draw(pipe).nbytes


def test_saved_and_loaded(profile: ck.Profile, tmp_path: Path) -> None:
    again = ck.Profile.load(profile.save(tmp_path / "profile.safetensors"))
    assert again.front == profile.front
    assert again.identity == profile.identity
    assert again.magnitudes == profile.magnitudes
    assert torch.equal(again.gram, profile.gram)
    assert again.notes == profile.notes


_ELSEWHERE = """
import sys, torch, cachekit as ck
from cachekit import zoo
torch.set_num_threads(1)
pipe = zoo.load("emoji-flux")
profile = ck.Profile.load(sys.argv[1])
ck.enable_cache(pipe, ck.ScheduleCacheConfig.from_profile(profile, computed_steps=5))
image = pipe("red heart", num_inference_steps=8, generator=torch.Generator().manual_seed(0), output_type="latent",
             negative_prompt="", true_cfg_scale=3.0).images
torch.save(image, sys.argv[2])
"""


def test_another_process_draws_the_same(profile: ck.Profile, pipe: Any, tmp_path: Path) -> None:
    path, result = profile.save(tmp_path / "profile.safetensors"), tmp_path / "image.pt"
    subprocess.run([sys.executable, "-c", _ELSEWHERE, str(path), str(result)], check=True, capture_output=True)
    with ck.cached(pipe, ck.ScheduleCacheConfig.from_profile(profile, computed_steps=5)):
        here = draw(pipe)
    assert torch.equal(torch.load(result, weights_only=True), here)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"computed_steps": 4}, "no schedule with 4 of 8 computed steps.*3 to 5.*budgets=\\[4\\]"),
        ({"speedup": 1.1}, "no schedule with 8 of 8"),
        ({"speedup": 0.5}, "at least 1"),
        ({"speedup": math.nan}, "at least 1"),
        ({"min_psnr": 500}, "reaches 500 dB; the best has"),
        ({}, "exactly one"),
        ({"speedup": 2, "min_psnr": 30}, "exactly one"),
    ],
    ids=str,
)
def test_budgets_that_there_are_not(profile: ck.Profile, budget: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ck.ScheduleCacheConfig.from_profile(profile, **budget)


def test_quality_takes_the_fewest_steps_that_reach_it(profile: ck.Profile) -> None:
    low, high = (point.low_psnr for point in profile.front)
    assert len(profile.choose(min_psnr=low - 1).computed_steps) == 3
    assert len(profile.choose(min_psnr=(low + high) / 2).computed_steps) == 5


def test_another_scheduler_is_refused(profile: ck.Profile, pipe: Any) -> None:
    config, before = ck.ScheduleCacheConfig.from_profile(profile, computed_steps=5), pipe.scheduler
    pipe.scheduler = EulerDiscreteScheduler()
    try:
        with pytest.raises(ck.ProfileMismatchError, match="EulerDiscreteScheduler instead of FlowMatchEuler"):
            ck.enable_cache(pipe, config)
        assert not ck.is_cache_enabled(pipe)
        unchecked = ck.ScheduleCacheConfig.from_profile(profile, computed_steps=5, check=False)
        ck.enable_cache(pipe, unchecked).disable()
    finally:
        pipe.scheduler = before


def test_other_weights_and_another_dtype_are_refused(profile: ck.Profile, pipe: Any) -> None:
    config = ck.ScheduleCacheConfig.from_profile(profile, computed_steps=5)
    other = zoo.load("emoji-flux", dtype=torch.bfloat16)
    with pytest.raises(ck.ProfileMismatchError, match="dtype bfloat16 instead of float32") as error:
        ck.enable_cache(other, config)
    assert "other weights" not in str(error.value), "rounding is no other checkpoint"
    weight = pipe.transformer.x_embedder.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(1.5)
    try:
        with pytest.raises(ck.ProfileMismatchError, match="other weights"):
            ck.enable_cache(pipe, config)
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def test_an_interrupted_calibration_goes_on(profile: ck.Profile, pipe: Any, tmp_path: Path) -> None:
    path, prompts = tmp_path / "part.safetensors", zoo.prompts("emoji-flux")[:8]
    settings: dict[str, Any] = {"evaluations": 1, "progress": False, **GUIDANCE}
    ck.calibrate(pipe, prompts, STEPS, budgets=[3], resume=path, **settings)
    kept = ck.Profile.load(path).front[0]
    assert kept == profile.front[0]
    both = ck.calibrate(pipe, prompts, STEPS, budgets=[3, 5], resume=path, **settings)
    assert both.front == profile.front == ck.Profile.load(path).front


def test_bad_input(pipe: Any) -> None:
    with pytest.raises(ValueError, match="prompts is empty"):
        ck.calibrate(pipe, [], progress=False)
    with pytest.raises(ValueError, match="held_back"):
        ck.calibrate(pipe, ["fox"], held_back=1.0, progress=False)
    with pytest.raises(ValueError, match="budgets: numbers of computed steps from 1 to 2"):
        ck.calibrate(pipe, ["fox"], 2, budgets=[3], progress=False)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="not a safetensors file"):
        ck.Profile.load(path)
    with pytest.raises(FileNotFoundError):
        ck.Profile.load(tmp_path / "missing.safetensors")
    ratios = ck.MagnitudeRatios({"": (1.0, 1.1)}, {"": (0.0, 0.0)}, 1)
    with pytest.raises(ValueError, match="holds no profile"):
        ck.Profile.load(ratios.save(tmp_path / "ratios.safetensors"))
