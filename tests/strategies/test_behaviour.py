"""The strategies on the toy: what each computes and reuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cachekit as ck

from ..pipelines.tiny import TINY
from ..toys import Stack, bare_loop, of_time, pattern, prompt, toy_pipeline


def test_first_block_follows_the_drift_since_the_last_computed_step() -> None:
    """Small moves add up: the reference is the last computed step, not the last step."""
    values = iter([1.0, 1.04, 1.08, 1.12, 1.16, 1.2, 1.24, 1.28])
    current = {"value": 1.0}
    model = Stack(3, lambda x, t: torch.full_like(x, current["value"]))

    def at_step(step: int) -> None:
        current["value"] = next(values)

    with ck.cached(model, "first_block", threshold=0.1):
        bare_loop(model, at_step=at_step)
        assert pattern(model) == "#..#..#."
        scores = [decision.score for decision in ck.stats(model).last.decisions]
        assert scores[1:4] == pytest.approx([0.04, 0.08, 0.12], abs=1e-4)


def test_magcache() -> None:
    pipe = toy_pipeline(change=of_time(torch.cos))
    ratios = [1.0, 1.0, 1.0, 0.9, 0.9, 0.9, 0.9, 0.9]
    with ck.cached(pipe, "magcache", mag_ratios=ratios, threshold=0.3, retention_ratio=0.25, max_skip_steps=4):
        pipe(8)
        # From step 3: 0.1, then 0.1 + 0.19 = 0.29, then 0.29 + 0.271.
        assert pattern(pipe) == "##...#.."


def test_magcache_cap() -> None:
    pipe = toy_pipeline()
    ck.enable_cache(pipe, "magcache", mag_ratios=[1.0] * 8, retention_ratio=0.0, max_skip_steps=2)
    with pytest.warns(ck.CacheWarning, match="cap"):
        pipe(8)
    assert pattern(pipe) == "#..#..#."


def test_magcache_with_guidance_uses_the_curve_of_the_branch() -> None:
    """U35."""
    pipe = toy_pipeline(change=of_time(torch.cos))
    conditions = [{"encoder_hidden_states": prompt(1)}, {"encoder_hidden_states": prompt(2)}]
    ratios = {"cond": [1.0] * 8, "uncond": [1.0, 0.1] * 4}
    with ck.cached(pipe, "magcache", mag_ratios=ratios, threshold=0.05, retention_ratio=0.1, max_skip_steps=9):
        pipe(8, conditions=conditions)
        assert pattern(pipe, "cond") == "#......."
        assert "#" in pattern(pipe, "uncond")[1:]


@pytest.mark.parametrize("calls", [1, 2])
def test_calibration_measures_the_ratio_of_residuals(calls: int) -> None:
    """The residual halves every step, so every ratio but the first is one half."""
    current = {"value": 2.0}
    model = Stack(3, lambda x, t: torch.full_like(x, current["value"]))

    def at_step(step: int) -> None:
        current["value"] = 2.0**-step

    conditions = [{"encoder_hidden_states": prompt(seed)} for seed in range(calls)]
    with ck.cached(model, "magcache", calibrate=True):
        bare_loop(model, 6, conditions=conditions, at_step=at_step)
        ratios = ck.stats(model).magnitude_ratios
        assert set(ratios) == {"cond", "uncond"} if calls == 2 else {"cond"}
        for curve in ratios.values():
            assert curve == pytest.approx([1.0] + [0.5] * 5)
        assert pattern(model) == "#" * 6 * calls
    again = ck.MagCacheConfig(mag_ratios=ratios)
    assert again.mag_ratios["cond"] == tuple(ratios["cond"])


def test_calibration_of_a_real_pipeline_gives_one_ratio_a_step() -> None:
    for name, branches in (("wan", {"cond", "uncond"}), ("flux-img2img", {"cond", "uncond"})):
        tiny = TINY[name]
        pipe = tiny.build()
        base = tiny.call(pipe, steps=8)
        with ck.cached(pipe, "magcache", calibrate=True):
            assert torch.equal(tiny.call(pipe, steps=8), base)
            stats = ck.stats(pipe)
            assert set(stats.magnitude_ratios) == branches
            for curve in stats.magnitude_ratios.values():
                assert len(curve) == stats.last.steps
                assert curve[0] == 1.0
                assert len(set(curve[1:])) > 1


def test_calibration_of_two_experts_joins_the_curve() -> None:
    """U71."""
    tiny = TINY["wan-two-experts"]
    pipe = tiny.build()
    with ck.cached(pipe, "magcache", calibrate=True):
        tiny.call(pipe, steps=8)
        assert [len(curve) for curve in ck.stats(pipe).magnitude_ratios.values()] == [8, 8]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"cache_interval": 3, "disable_cache_before_step": 1}, "#..#..#..#"),
        ({"cache_interval": 3, "disable_cache_before_step": 3}, "###..#..#."),
        ({"cache_interval": 4, "disable_cache_before_step": 2, "disable_cache_after_step": 8}, "##...#..##"),
        ({"cache_interval": 1}, "##########"),
    ],
)
@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_taylorseer(fields: dict[str, Any], expected: str) -> None:
    pipe = toy_pipeline(change=of_time(torch.cos))
    with ck.cached(pipe, "taylorseer", **fields):
        pipe(10)
        assert pattern(pipe) == expected


@pytest.mark.parametrize("name", ["flux", "sd3", "latte", "sd15"])
def test_taylorseer_on_attention_outputs(name: str) -> None:
    """The paper's site: blocks run, attention does not."""
    tiny = TINY[name]
    pipe = tiny.build()
    model = getattr(pipe, tiny.denoisers[0])
    base = tiny.call(pipe, steps=6)
    config = ck.TaylorSeerCacheConfig(use_lite_mode=False, cache_interval=3, disable_cache_before_step=2)
    counts: dict[str, int] = {}
    for path, module in model.named_modules():
        if path.endswith((".attn", ".attn1")):
            module.register_forward_pre_hook(lambda *_, p=path: counts.__setitem__(p, counts.get(p, 0) + 1))
    with ck.cached(pipe, config):
        output = tiny.call(pipe, steps=6)
        computed, calls = ck.stats(pipe).computed, ck.stats(pipe).calls
    assert computed < calls
    assert counts
    assert set(counts.values()) == {computed}
    assert torch.isfinite(output).all()
    assert not torch.equal(output, base)
    assert torch.equal(tiny.call(pipe, steps=6), base)


def test_taylorseer_zeroed_and_predicted_modules() -> None:
    tiny = TINY["flux"]
    pipe = tiny.build()
    fields: dict[str, Any] = {
        "skip_predict_identifiers": [r"transformer_blocks\.\d+\.attn", r"single_transformer_blocks\.\d+\.attn"],
        "cache_identifiers": [r"transformer_blocks\.\d+\.ff", r"single_transformer_blocks\.\d+\.proj_out"],
    }
    with ck.cached(pipe, "taylorseer", cache_interval=3, disable_cache_before_step=1, **fields) as handle:
        assert "8 modules predicted, 8 zeroed" in handle.report
        output = tiny.call(pipe, steps=5, guidance=False)
        assert pattern(pipe) == "#..#."
    assert torch.isfinite(output).all()
