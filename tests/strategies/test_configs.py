"""Configs check what they are given, and diffusers' own ones are understood."""

from __future__ import annotations

import dataclasses
from typing import Any

import diffusers
import pytest
import torch

import cachekit as ck
from cachekit.strategies import find_strategy, strategy_names, to_config

BAD: list[tuple[Any, dict[str, Any], str]] = [
    (ck.FirstBlockCacheConfig, {"threshold": -0.1}, "threshold"),
    (ck.FirstBlockCacheConfig, {"threshold": float("nan")}, "threshold"),
    (ck.FirstBlockCacheConfig, {"threshold": float("inf")}, "threshold"),
    (ck.FirstBlockCacheConfig, {"threshold": "much"}, "threshold"),
    (ck.FirstBlockCacheConfig, {"threshold": None}, "threshold"),
    (ck.FirstBlockCacheConfig, {"cache_dtype": "float16"}, "cache_dtype"),
    (ck.FirstBlockCacheConfig, {"cache_device": "nowhere"}, "cache_device"),
    (ck.TaylorSeerCacheConfig, {"cache_interval": 0}, "cache_interval"),
    (ck.TaylorSeerCacheConfig, {"cache_interval": 2.5}, "cache_interval"),
    (ck.TaylorSeerCacheConfig, {"max_order": -1}, "max_order"),
    (ck.TaylorSeerCacheConfig, {"disable_cache_after_step": -1}, "disable_cache_after_step"),
    (ck.TaylorSeerCacheConfig, {"taylor_factors_dtype": 16}, "taylor_factors_dtype"),
    (ck.TaylorSeerCacheConfig, {"cache_identifiers": "attn"}, "cache_identifiers"),
    (ck.TaylorSeerCacheConfig, {"use_lite_mode": True, "cache_identifiers": ["a"]}, "use_lite_mode"),
    (ck.MagCacheConfig, {}, "mag_ratios"),
    (ck.MagCacheConfig, {"mag_ratios": []}, "mag_ratios"),
    (ck.MagCacheConfig, {"mag_ratios": {}}, "mag_ratios"),
    (ck.MagCacheConfig, {"mag_ratios": [1.0, 0.0]}, "mag_ratios"),
    (ck.MagCacheConfig, {"mag_ratios": [1.0, float("nan")]}, "mag_ratios"),
    (ck.MagCacheConfig, {"mag_ratios": 1.0}, "mag_ratios"),
    (ck.MagCacheConfig, {"mag_ratios": [1.0], "retention_ratio": 1.5}, "retention_ratio"),
    (ck.MagCacheConfig, {"mag_ratios": [1.0], "max_skip_steps": 0}, "max_skip_steps"),
    (ck.MagCacheConfig, {"mag_ratios": [1.0], "num_inference_steps": 0}, "num_inference_steps"),
]


@pytest.mark.parametrize(("config", "fields", "named"), BAD, ids=[f"{c.__name__}-{f}" for c, f, _ in BAD])
def test_bad_values_name_the_field(config: Any, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        config(**fields)


def test_the_missing_ratios_name_the_cure() -> None:
    with pytest.raises(ValueError, match="calibrate"):
        ck.MagCacheConfig()


def test_configs_are_values() -> None:
    config = ck.FirstBlockCacheConfig(0.1)
    assert config == ck.FirstBlockCacheConfig(threshold=0.1)
    with pytest.raises(AttributeError):
        config.threshold = 0.2  # type: ignore[misc]
    assert config.replaced(threshold=0.3).threshold == 0.3
    assert config.threshold == 0.1
    assert "0.1" in str(config)


def test_names() -> None:
    assert {"first_block", "magcache", "taylorseer"} <= set(strategy_names())
    assert to_config("first_block", {}) == ck.FirstBlockCacheConfig()
    assert to_config("taylorseer", {"cache_interval": 7}).cache_interval == 7
    assert not any(find_strategy(to_config(name, {})).lossless for name in ("first_block", "taylorseer"))


PAIRS = [
    (
        diffusers.FirstBlockCacheConfig(threshold=0.12),
        ck.FirstBlockCacheConfig(threshold=0.12),
    ),
    (
        diffusers.MagCacheConfig(threshold=0.1, max_skip_steps=2, num_inference_steps=3, mag_ratios=[1.0, 0.5, 0.75]),
        ck.MagCacheConfig(threshold=0.1, max_skip_steps=2, num_inference_steps=3, mag_ratios=[1.0, 0.5, 0.75]),
    ),
    (
        diffusers.MagCacheConfig(mag_ratios=torch.tensor([1.0, 0.5]), num_inference_steps=2),
        ck.MagCacheConfig(mag_ratios=[1.0, 0.5], num_inference_steps=2),
    ),
    (diffusers.MagCacheConfig(calibrate=True), ck.MagCacheConfig(calibrate=True)),
    (
        diffusers.TaylorSeerCacheConfig(cache_interval=4, max_order=2, use_lite_mode=True),
        ck.TaylorSeerCacheConfig(
            cache_interval=4, max_order=2, use_lite_mode=True, taylor_factors_dtype=torch.bfloat16
        ),
    ),
    (
        diffusers.TaylorSeerCacheConfig(cache_identifiers=[r".*attn"], taylor_factors_dtype=torch.float32),
        ck.TaylorSeerCacheConfig(
            cache_identifiers=[r".*attn"], taylor_factors_dtype=torch.float32, use_lite_mode=False
        ),
    ),
]


@pytest.mark.parametrize(("foreign", "ours"), PAIRS, ids=[type(foreign).__name__ for foreign, _ in PAIRS])
def test_diffusers_configs_are_translated(foreign: Any, ours: Any) -> None:
    assert to_config(foreign, {}) == ours


@pytest.mark.parametrize("name", ["FirstBlockCacheConfig", "MagCacheConfig", "TaylorSeerCacheConfig"])
def test_field_names_and_plain_defaults_are_those_of_diffusers(name: str) -> None:
    theirs = {field.name: field for field in dataclasses.fields(getattr(diffusers, name))}
    ours = {field.name for field in dataclasses.fields(getattr(ck, name))}
    assert {field for field in theirs if not field.startswith("_")} <= ours
    needed = {"mag_ratios": [1.0]} if name == "MagCacheConfig" else {}
    mine, other = getattr(ck, name)(**needed), getattr(diffusers, name)(**needed)
    differ = {
        field
        for field in theirs
        if isinstance(getattr(other, field), (int, float))
        and field not in ("use_lite_mode",)
        and getattr(mine, field) != getattr(other, field)
    }
    assert not differ


def test_edge_values_that_diffusers_accepts() -> None:
    """A config object that worked with diffusers is not refused here."""
    to_config(diffusers.TaylorSeerCacheConfig(disable_cache_before_step=0), {})
    to_config(diffusers.MagCacheConfig(mag_ratios=[1.0] * 4, retention_ratio=0.0, max_skip_steps=5), {})


def test_overrides_win_over_diffusers_fields() -> None:
    assert to_config(diffusers.FirstBlockCacheConfig(threshold=0.1), {"threshold": 0.3}).threshold == 0.3
    with pytest.raises(ValueError, match="did you mean"):
        to_config(diffusers.FirstBlockCacheConfig(), {"threshhold": 0.3})


RATIOS = [
    ([1.0, 0.5], {"": (1.0, 0.5)}),
    ((1.0, 0.5), {"": (1.0, 0.5)}),
    (torch.tensor([1.0, 0.5]), {"": (1.0, 0.5)}),
    (torch.tensor([[1.0, 0.5]], dtype=torch.bfloat16), {"": (1.0, 0.5)}),
    ({"cond": [1.0], "uncond": torch.tensor([0.5])}, {"cond": (1.0,), "uncond": (0.5,)}),
]


@pytest.mark.parametrize(("given", "kept"), RATIOS)
def test_ratios_in_every_form(given: Any, kept: Any) -> None:
    assert ck.MagCacheConfig(mag_ratios=given).mag_ratios == kept
