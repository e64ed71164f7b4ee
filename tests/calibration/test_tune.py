"""Tuning on a tiny real pipeline: bounded, repeatable, honest about what it cannot reach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cachekit as ck
from cachekit.calibration.candidates import sources_of, strategy_candidates
from cachekit.calibration.measure import Bench
from cachekit.calibration.target import Target
from cachekit.strategies import strategy_named

from ..shipped import shipped_strategies
from .tuning import PROMPTS, tiny_flux

STEPS = 6


@pytest.fixture(scope="module")
def flux() -> tuple[Any, dict[str, Any]]:
    return tiny_flux()


def tuned(flux: tuple[Any, dict[str, Any]], **settings: Any) -> ck.TuneResult:
    pipe, arguments = flux
    told: dict[str, Any] = {"num_inference_steps": STEPS, "progress": False, "pictures": 1, **arguments, **settings}
    return ck.tune(pipe, PROMPTS, **told)


@pytest.fixture(scope="module")
def first_block(flux: tuple[Any, dict[str, Any]]) -> ck.TuneResult:
    return tuned(flux, strategy="first_block", speedup=1.5, evaluations=12, pictures=2)


def test_a_threshold_for_a_speed(first_block: ck.TuneResult, flux: tuple[Any, dict[str, Any]]) -> None:
    best = first_block.best
    assert best is not None
    assert best.speedup() >= 1.5 * 0.98
    assert len(first_block.curve) <= 12
    speeds = [measured.speedup() for measured in first_block.curve]
    assert speeds == sorted(speeds)
    assert not [item for item in first_block.curve if item.speedup() >= 1.5 * 0.98 and item.mean > best.mean], (
        "the best that reaches the target"
    )
    config = first_block.config
    assert isinstance(config, ck.FirstBlockCacheConfig)
    assert config.threshold == best.setting.value
    pipe, _ = flux
    assert not ck.is_cache_enabled(pipe)
    ck.enable_cache(pipe, config).disable()


def test_it_repeats_and_another_seed_draws_other_noise(flux: tuple[Any, dict[str, Any]]) -> None:
    def figures(**settings: Any) -> list[tuple[str, float, float]]:
        curve = tuned(flux, strategy="taylorseer", speedup=1.5, evaluations=2, **settings).curve
        return [(item.setting.label, item.mean, item.computed) for item in curve]

    first = figures()
    assert figures() == first
    assert figures(seed=7) != first


def test_neighbours_of_the_threshold_are_measured(first_block: ck.TuneResult) -> None:
    best = first_block.best
    assert best is not None
    around = [item.setting.value / best.setting.value for item in first_block.curve]
    assert any(1 < ratio <= 1.06 for ratio in around)
    assert any(0.94 <= ratio < 1 for ratio in around)


def test_a_quality(flux: tuple[Any, dict[str, Any]]) -> None:
    reachable = tuned(flux, strategy="taylorseer", speedup=1.5, evaluations=2).curve[0].low
    result = tuned(flux, strategy="taylorseer", min_psnr=max(reachable - 1, 1), evaluations=4)
    assert result.best is not None
    assert result.best.low >= reachable - 1
    assert result.best.skips


def test_what_cannot_be_reached_is_said(flux: tuple[Any, dict[str, Any]]) -> None:
    result = tuned(flux, strategy="taylorseer", speedup=50, evaluations=4)
    assert result.best is None
    with pytest.raises(ValueError, match="no setting of taylorseer reaches speed-up 50x by work; the nearest is"):
        _ = result.config
    assert "no setting of taylorseer" in str(result)
    nothing = tuned(flux, strategy="seacache", speedup=2, evaluations=2, fields={"retention_steps": 100})
    assert nothing.best is None
    assert any("no call was ever reused (" in note and "warm-up" in note for note in nothing.notes)


def test_fields_stay_as_the_user_sets_them(flux: tuple[Any, dict[str, Any]]) -> None:
    result = tuned(flux, strategy="taylorseer", speedup=1.5, evaluations=4, fields={"disable_cache_before_step": 2})
    assert isinstance(result.config, ck.TaylorSeerCacheConfig)
    assert result.config.disable_cache_before_step == 2
    assert all("short warm-up" not in item.setting.label for item in result.curve)


def test_variants_are_searched(flux: tuple[Any, dict[str, Any]]) -> None:
    result = tuned(flux, strategy="taylorseer", speedup=2, evaluations=8)
    assert {"short warm-up" in item.setting.label for item in result.curve} == {True, False}


@pytest.mark.parametrize("name", [name for name in shipped_strategies() if name not in ("text_kv", "deepcache")])
def test_every_strategy_says_what_can_be_tuned(name: str, flux: tuple[Any, dict[str, Any]]) -> None:
    result = tuned(flux, strategy=name, speedup=1.05, evaluations=6, num_inference_steps=4)
    assert any(item.skips for item in result.curve), str(result)
    assert all(item.setting.name == name for item in result.curve)


def test_bounds_make_valid_configs() -> None:
    pipe, arguments = tiny_flux()
    bench = Bench(pipe, PROMPTS[:1], 4, 0, arguments)
    sources = sources_of(bench, None)
    for name in shipped_strategies():
        tunable = strategy_named(name).tunable
        if tunable is None:
            assert strategy_named(name).lossless
            continue
        for candidate in strategy_candidates(strategy_named(name), sources, Target(speedup=2), 4, {}):
            for value in (tunable.low, tunable.high or sources.steps - 1):
                candidate.setting(value)


def test_magnitude_ratios_are_measured_once(flux: tuple[Any, dict[str, Any]]) -> None:
    result = tuned(flux, strategy="magcache", speedup=1.2, evaluations=3)
    ratios = [item.setting.config.mag_ratios for item in result.curve]  # type: ignore[union-attr]
    assert all(item == ratios[0] for item in ratios)
    assert set(ratios[0]) == {"cond", "uncond"}
    assert all(len(curve) == STEPS for curve in ratios[0].values())


def test_a_profile_brings_schedules_and_ratios(flux: tuple[Any, dict[str, Any]]) -> None:
    pipe, arguments = flux
    told = {"progress": False, **arguments}
    profile = ck.calibrate(pipe, PROMPTS, STEPS, budgets=[3, 5], evaluations=0, held_back=0.5, **told)
    result = ck.tune(pipe, profile, PROMPTS, strategy="schedule", speedup=2, **told)
    assert result.about["prompts"] == 2, "those that the calibration held back"
    assert isinstance(result.config, ck.ScheduleCacheConfig)
    assert result.config.computed_steps[""] == profile.front[0].computed_steps
    assert result.config.coefficients is not None
    assert result.about["num_inference_steps"] == STEPS
    ratios = ck.tune(pipe, profile, ["a new one"], strategy="magcache", speedup=1.2, evaluations=1, **told)
    assert ratios.curve[0].setting.config.mag_ratios == profile.magnitudes  # type: ignore[union-attr]
    with pytest.raises(ck.ProfileMismatchError, match=r"true_cfg_scale=1\.5 instead of 4\.0"):
        ck.tune(pipe, profile, PROMPTS, speedup=2, **{**told, "true_cfg_scale": 1.5})
    with pytest.raises(TypeError, match="keeps no texts"):
        ck.tune(pipe, profile, speedup=2, **told)


def test_the_report(first_block: ck.TuneResult, tmp_path: Path) -> None:
    text = str(first_block)
    assert text.startswith("first_block on FluxPipeline for speed-up 1.5x by work; 2 prompts")
    assert "by work" in text
    assert f"* {first_block.config}" in text
    saved = json.loads(first_block.save(tmp_path / "tuned.json").read_text())
    assert len(saved["curve"]) == len(first_block.curve)
    assert saved["best"]["value"] == first_block.config.threshold  # type: ignore[attr-defined]
    assert saved["target"] == {"speedup": 1.5, "min_psnr": None, "by": "work"}
    with pytest.raises(FileNotFoundError, match="does not exist"):
        first_block.save(tmp_path / "no" / "tuned.json")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({}, ValueError, "exactly one"),
        ({"speedup": 2, "strategy": "first_blok"}, ValueError, "did you mean 'first_block'"),
        ({"speedup": 2, "strategy": "text_kv"}, ValueError, "nothing to tune"),
        ({"speedup": 2, "strategy": "deepcache"}, ck.UnsupportedModelError, "no UNet"),
        ({"speedup": 2, "fields": {"threshold": 0.1}}, ValueError, "threshold is what is tuned"),
        ({"speedup": 2, "fields": {"treshold": 0.1}}, ValueError, "has no field"),
        ({"speedup": 2, "evaluations": 0}, ValueError, "at least 1"),
        ({"speedup": 2, "pictures": 0}, ValueError, "at least 1"),
        ({"speedup": 2, "prompts": PROMPTS}, TypeError, "prompts once"),
    ],
    ids=str,
)
def test_bad_input(
    flux: tuple[Any, dict[str, Any]], settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tuned(flux, **{"num_inference_steps": 3, **settings})
    assert not ck.is_cache_enabled(flux[0])
