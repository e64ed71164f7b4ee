"""What a profile holds, its file, merging, the hub, and what is refused; on a denoiser known in closed form."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    LCMScheduler,
    UniPCMultistepScheduler,
)
from safetensors.torch import save_file

import cachekit as ck
from cachekit.calibration.fileio import read_tensors
from cachekit.calibration.front import FrontPoint
from cachekit.calibration.runs import Batch
from cachekit.calibration.search import spread
from cachekit.calibration.stochastic import StochasticSamplerError, draws_noise

from ..toys import toy_pipeline
from .support import PROMPTS, MixturePipeline, calibrated, mixture

STEPS = 12


@pytest.fixture(scope="module")
def profile() -> ck.Profile:
    return calibrated(mixture())


def batch_of(scheduler: Any, steps: int = STEPS) -> Batch:
    batch = Batch(mixture(scheduler), PROMPTS, steps, 0, {}, 3)
    batch.run_uncached()
    return batch


def test_curves_have_a_value_per_step(profile: ck.Profile) -> None:
    assert len(profile.sigmas) == len(profile.latent_drift) == len(profile.seconds) == STEPS
    assert list(profile.sigmas) == sorted(profile.sigmas, reverse=True)
    assert profile.latent_drift[0] == 0
    assert all(drift > 0 for drift in profile.latent_drift[1:])
    assert all(seconds > 0 for seconds in profile.seconds)
    assert profile.batch == profile.samples == 4
    assert profile.starts == (0,)
    assert profile.is_affine
    assert profile.magnitudes == profile.drifts == {}, "a model without blocks"


def test_saved_and_loaded(profile: ck.Profile, tmp_path: Path) -> None:
    again = ck.Profile.load(profile.save(tmp_path / "p.safetensors"))
    for name in ("identity", "front", "sigmas", "latent_drift", "seconds", "batch", "starts", "is_affine", "drifts"):
        assert getattr(again, name) == getattr(profile, name), name
    assert [path.name for path in tmp_path.iterdir()] == ["p.safetensors"], "no temporary file is left"


def rewritten(profile: ck.Profile, path: Path, version: int, dropped: tuple[str, ...]) -> Path:
    """The file of a profile with another version number and without some of its tensors."""
    tensors, metadata = read_tensors(profile.save(path))
    header = {**json.loads(metadata["cachekit"]), "version": version}
    kept = {name: value for name, value in tensors.items() if name not in dropped}
    save_file(kept, path, {**metadata, "cachekit": json.dumps(header)})
    return path


def test_an_older_file_is_read(profile: ck.Profile, tmp_path: Path) -> None:
    path = rewritten(profile, tmp_path / "old.safetensors", 1, ("sigmas", "seconds", "latent_drift"))
    old = ck.Profile.load(path)
    assert old.front == profile.front
    assert old.sigmas == old.seconds == ()
    with pytest.raises(ValueError, match=r"an older file.*calibrate with num_inference_steps=9"):
        ck.ScheduleCacheConfig.from_profile(old, speedup=2, num_inference_steps=9)


def test_newer_and_damaged_files_are_refused(profile: ck.Profile, tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    with pytest.raises(ValueError, match="newer cachekit"):
        ck.Profile.load(rewritten(profile, path, 99, ()))
    with pytest.raises(ValueError, match=r"damaged profile.*calibrate"):
        ck.Profile.load(rewritten(profile, path, 2, ("sigmas",)))
    with pytest.raises(ValueError, match="damaged profile"):
        ck.Profile.load(rewritten(profile, path, 2, ("front/4/weights",)))


def test_a_failed_write_keeps_the_old_file(
    profile: ck.Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = profile.save(tmp_path / "p.safetensors")
    before = path.read_bytes()

    def broken(source: str, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("cachekit.files.os.replace", broken)
    with pytest.raises(OSError, match="disk full"):
        replace(profile, samples=99).save(path)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["p.safetensors"]


def test_magcache_takes_a_profile() -> None:
    pipe = toy_pipeline()
    identity = calibrated(mixture(), budgets=[4]).identity
    made = ck.calibration.identity.identify(pipe, 8, (4, 8), {}, ["x"])
    bare = ck.Profile(made, torch.eye(8), torch.ones(8), {"cond": (1.0,) * 8}, (), 1)
    config = ck.MagCacheConfig(mag_ratios=bare, threshold=0.1)
    assert config.mag_ratios == {"cond": (1.0,) * 8}
    with ck.cached(pipe, config):
        pipe()
        assert ck.stats(pipe).reused > 0
    other = ck.MagCacheConfig(mag_ratios=replace(bare, identity=identity))
    with pytest.raises(ck.ProfileMismatchError, match=r"Mixture.*mag_ratios=profile.magnitudes"):
        ck.enable_cache(pipe, other)
    with pytest.raises(ck.ProfileMismatchError):
        ck.enable_cache(pipe, other.replaced(threshold=0.2))
    assert not ck.is_cache_enabled(pipe)
    with ck.cached(pipe, ck.MagCacheConfig(mag_ratios=replace(bare, identity=identity).magnitudes)):
        pipe()
    with pytest.raises(ck.ConfigError, match="mag_ratios is empty"):
        ck.MagCacheConfig(mag_ratios=replace(bare, magnitudes={}))


def test_merged_over_the_prompts_of_both(profile: ck.Profile) -> None:
    other = calibrated(mixture(), ("a", "b", "c", "d", "e", "f", "g", "h"), budgets=[3, 4], held_back=0)
    both = profile.merge(other)
    assert both.samples == 12
    torch.testing.assert_close(both.gram, (4 * profile.gram + 8 * other.gram) / 12)
    assert both.latent_drift[3] == pytest.approx((4 * profile.latent_drift[3] + 8 * other.latent_drift[3]) / 12)
    assert [len(point.computed_steps) for point in both.front] == [3, 4, 6]
    assert both.front[0] == other.front[0]
    assert both.front[1] in (profile.front[0], other.front[1]), "schedules are not mixed"
    assert both.identity.prompts not in (profile.identity.prompts, other.identity.prompts)
    assert other.merge(profile).front == both.front, "the order does not matter"
    assert (
        ck.ScheduleCacheConfig.from_profile(both, computed_steps=3).computed_steps[""] == other.front[0].computed_steps
    )


def test_the_better_of_two_schedules_is_kept(profile: ck.Profile) -> None:
    """The one without coefficients that computes the first steps only is worse by far."""
    bad = FrontPoint((0, 1, 2, 3), {}, 0.0, (90.0,))
    other = replace(profile, front=(bad,), identity=replace(profile.identity, prompts="others"))
    assert profile.merge(other).front[0] == other.merge(profile).front[0] == profile.front[0]


def test_what_does_not_belong_together_is_not_merged(profile: ck.Profile) -> None:
    with pytest.raises(ValueError, match="same prompts"):
        profile.merge(profile)
    other = calibrated(mixture(), ("a", "b"), steps=8, guidance=4.0)
    with pytest.raises(ck.ProfileMismatchError, match=r"steps: 8 instead of 12.*guidance: 4.0 instead of not given"):
        profile.merge(other)
    euler = calibrated(mixture(EulerDiscreteScheduler()), ("a", "b"))
    with pytest.raises(ck.ProfileMismatchError, match="scheduler: EulerDiscreteScheduler"):
        profile.merge(euler)


class Hub:
    """Stands in for the hub: repositories are folders."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def create_repo(self, repo_id: str, **_: Any) -> Any:
        (self.root / repo_id).mkdir(parents=True, exist_ok=True)
        return type("Url", (), {"repo_id": repo_id})()

    def upload_folder(self, repo_id: str, folder_path: Path, **_: Any) -> str:
        for path in Path(folder_path).iterdir():
            (self.root / repo_id / path.name).write_bytes(path.read_bytes())
        return f"commit of {repo_id}"


def test_hub(profile: ck.Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", lambda token=None: Hub(tmp_path))
    assert profile.push_to_hub("someone/fast-mixture") == "commit of someone/fast-mixture"
    folder = tmp_path / "someone" / "fast-mixture"
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "cachekit_profile.safetensors"]
    card = (folder / "README.md").read_text()
    assert 'from_hub("someone/fast-mixture")' in card
    assert "profile of Mixture" in card

    def download(repo_id: str, filename: str, **_: Any) -> str:
        return str(tmp_path / repo_id / filename)

    monkeypatch.setattr("cachekit.calibration.hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", download)
    (folder / "config.json").write_text("{}")
    assert ck.Profile.from_hub("someone/fast-mixture", local_files_only=True).front == profile.front
    assert ck.Profile.from_hub(folder).front == profile.front
    with pytest.raises(FileNotFoundError):
        ck.Profile.from_hub(tmp_path)


@pytest.mark.parametrize(
    "scheduler", [LCMScheduler(), EulerAncestralDiscreteScheduler()], ids=lambda s: type(s).__name__
)
def test_few_step_stochastic_samplers_are_refused_with_the_figure(scheduler: Any) -> None:
    pipe = mixture(scheduler)
    with pytest.raises(StochasticSamplerError, match=r"4 of its 8 steps computed the latents end \d+% off"):
        calibrated(pipe, steps=8)
    assert not ck.is_cache_enabled(pipe)
    assert "step" not in vars(pipe.scheduler)


def test_stochastic_samplers_with_many_steps_are_served() -> None:
    found = calibrated(mixture(EulerAncestralDiscreteScheduler()), steps=40, budgets=[20], evaluations=0)
    assert found.front[0].mean_psnr > 10


def test_which_samplers_draw_noise() -> None:
    assert [draws_noise(batch_of(s).reference) for s in (LCMScheduler(), EulerAncestralDiscreteScheduler())] == [
        True
    ] * 2
    quiet = (DDIMScheduler(clip_sample=False), UniPCMultistepScheduler(), None)
    assert not any(draws_noise(batch_of(s).reference) for s in quiet)


@pytest.mark.parametrize(
    "scheduler", [UniPCMultistepScheduler(), DPMSolverMultistepScheduler()], ids=lambda s: type(s).__name__
)
def test_multistep_solvers_are_scored_on_the_final_latents(scheduler: Any) -> None:
    batch = batch_of(scheduler)
    schedule = spread(STEPS, 6)
    fitted, plain, reuse = batch.errors(schedule), batch.errors(schedule, False), batch.errors(schedule, False, 0)
    assert fitted.mean() < plain.mean() < reuse.mean()
    rows, pipe = batch.rows[schedule], batch.pipe
    batch.errors(schedule)
    final = pipe(PROMPTS, STEPS, _generators(), "latent")[0]
    config = ck.ScheduleCacheConfig(schedule, coefficients=ck.strategies.schedule.CoefficientTable(rows), depth=3)
    with ck.cached(pipe, config):
        off = ((pipe(PROMPTS, STEPS, _generators(), "latent")[0] - final) ** 2).flatten(1).mean(1)
    torch.testing.assert_close(off.double(), fitted, rtol=1e-3, atol=1e-9)


def _generators() -> list[torch.Generator]:
    return [torch.Generator().manual_seed(index) for index in range(len(PROMPTS))]


def test_steps_that_are_not_linear_extrapolate_and_say_so() -> None:
    clipping = DDIMScheduler(clip_sample=True, clip_sample_range=0.5)
    found = calibrated(mixture(clipping), budgets=[6], evaluations=0)
    assert not found.is_affine
    assert "not linear in the model output" in found.notes[0]
    assert "extrapolated" in found.notes[0]
    for used, weights in found.front[0].rows.values():
        assert len(used) == 1
        assert weights == (1.0,), "rows stand only where reuse was better than the extrapolation"
    with pytest.raises(ValueError, match="not linear"):
        found.resampled(10, speedup=2)


@pytest.mark.parametrize("scheduler", [None, UniPCMultistepScheduler()], ids=["flow", "unipc"])
def test_coefficients_are_never_worse_than_reuse_and_extrapolation(scheduler: Any) -> None:
    """On the calibration prompts, with the schedule that was found, measured on the final latents."""
    pipe = mixture(scheduler)
    found = calibrated(pipe, held_back=0, budgets=[2, 3, 5, 9])
    batch = Batch(pipe, PROMPTS, STEPS, 0, {}, 3)
    batch.run_uncached()
    for point in found.front:
        for order in (0, 1):
            plain = batch.errors(point.computed_steps, fitted=False, order=order)
            assert point.error <= float(10 * plain.clamp_min(1e-30).log10().mean()) + 1e-6


@pytest.mark.parametrize("size", [1, 4, 6])
def test_batches(size: int) -> None:
    """No call is larger than asked for, and what is found is as good."""
    pipe = mixture()
    batch = Batch(pipe, PROMPTS, STEPS, 0, {}, 3, size)
    pipe.sizes.clear()
    batch.run_uncached()
    whole = batch_of(None)
    schedule = spread(STEPS, 5)
    errors = batch.errors(schedule)
    assert max(pipe.sizes) == size
    assert len(errors) == len(PROMPTS)
    plain = whole.errors(schedule, fitted=False)
    torch.testing.assert_close(batch.errors(schedule, fitted=False), plain, rtol=1e-4, atol=1e-10)
    assert errors.mean() < 0.5 * plain.mean()
    assert errors.mean() < 1.5 * whole.errors(schedule).mean()
    rows = batch.rows[schedule]
    assert all(sum(weights) == pytest.approx(1) for _, weights in rows.values())
    assert batch.images(schedule, rows).shape == whole.images(schedule, rows).shape
    found = calibrated(pipe, batch_size=size)
    assert found.samples == 4
    assert found.batch == min(size, 4)


def test_batches_measure_what_one_does() -> None:
    one, three = calibrated(mixture(), budgets=[4]), calibrated(mixture(), budgets=[4], batch_size=2)
    torch.testing.assert_close(one.gram, three.gram, rtol=1e-5, atol=1e-6)
    assert three.latent_drift == pytest.approx(one.latent_drift, rel=0.05)
    assert three.sigmas == one.sigmas


class Broken(MixturePipeline):
    """Its latents become NaN in the third step."""

    def _advance(self, output: torch.Tensor, t: torch.Tensor, x: torch.Tensor, generator: torch.Generator) -> Any:
        result = super()._advance(output, t, x, generator)
        return result * math.nan if self.scheduler.step_index == 3 else result


def test_bad_input() -> None:
    pipe = mixture()
    with pytest.raises(ValueError, match="batch_size"):
        calibrated(pipe, batch_size=0)
    with pytest.raises(ValueError, match="NaN or infinity"):
        calibrated(Broken(pipe.transformer, pipe.scheduler))
    assert not ck.is_cache_enabled(pipe)


def test_pictures_without_any_difference() -> None:
    point = FrontPoint((0,), {}, 0.0, (40.0, math.inf))
    assert point.low_psnr == pytest.approx(48.0)
    assert point.mean_psnr == 120
