"""What the demo compares: a name, what a reader should know about it, and a cache config or another step count."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import cachekit
from cachekit.demo.drawing import GUIDANCE, caching, draw
from cachekit.errors import CacheKitError
from cachekit.strategies import find_strategy

Make = Callable[[Any, Sequence[str], int, int], tuple[str, cachekit.CacheConfig]]
"""Of a pipeline, prompts, a number of steps and a seed: the settings in a few words, and the config."""
_TRIAL_STEPS = 4


@dataclass(frozen=True)
class Method:
    """One row of the demo.

    Attributes:
        name: what the table calls it.
        settings: its settings in a few words.
        config: the cache to enable; None for none.
        steps: number of steps.
        preparation: what had to be measured before, and for how long; "" for nothing.
    """

    name: str
    settings: str
    steps: int
    config: cachekit.CacheConfig | None = None
    preparation: str = ""


@dataclass(frozen=True)
class NotApplicable:
    """A strategy that brings nothing on this pipeline."""

    name: str
    reason: str


@dataclass(frozen=True)
class Candidate:
    """A strategy at settings that skip about half of the embedded pipeline's steps, or at its defaults.

    Attributes:
        name: what the table calls it.
        strategy: its registered name.
        make: makes its config; measures what has to be measured.
        prompts: number of prompts that `make` measures on.
    """

    name: str
    strategy: str
    make: Make
    prompts: int = 0


def uncached(steps: int) -> Method:
    """The reference."""
    return Method("uncached", "", steps)


def fewer_steps(steps: int) -> Method:
    """The control: no cache, simply fewer steps."""
    return Method("fewer steps", f"control, {steps} step{'s' * (steps != 1)}", steps)


def prepared(candidate: Candidate, pipe: Any, prompts: Sequence[str], steps: int, seed: int) -> Method | NotApplicable:
    """The row of a strategy, or why it brings nothing here: refused, or exact and without anything to reuse.

    Args:
        candidate: the strategy.
        pipe: the pipeline, without a cache.
        prompts: for measuring; not those that are drawn.
        steps: number of steps.
        seed: of the noise that is measured on.
    """
    started = time.perf_counter()
    with warnings.catch_warnings():
        try:
            settings, config = candidate.make(pipe, prompts, steps, seed)
            spent = time.perf_counter() - started
            warnings.simplefilter("ignore", cachekit.CacheWarning)
            with caching(pipe, config):
                if find_strategy(config).lossless:
                    draw(pipe, prompts[0], _TRIAL_STEPS, seed, output_type="latent")
                run = cachekit.stats(pipe).last
        except CacheKitError as error:
            return NotApplicable(candidate.name, str(error))
    if run is not None and not run.reused:
        return NotApplicable(candidate.name, "; ".join(run.notes) or "nothing was reused")
    measured = f"calibrated on {len(prompts)} prompt{'s' * (len(prompts) != 1)} in {spent:.0f} s"
    return Method(candidate.name, settings, steps, config, measured if candidate.prompts else "")


def _first_block(pipe: Any, prompts: Sequence[str], steps: int, seed: int) -> tuple[str, cachekit.CacheConfig]:
    config = cachekit.FirstBlockCacheConfig(threshold=0.1)
    return f"threshold {config.threshold:g}", config


def _magcache(pipe: Any, prompts: Sequence[str], steps: int, seed: int) -> tuple[str, cachekit.CacheConfig]:
    ratios = cachekit.calibrate_magnitudes(
        pipe,
        prompts=list(prompts),
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
        **GUIDANCE,
    )
    config = cachekit.MagCacheConfig(mag_ratios=ratios, num_inference_steps=steps)
    return f"threshold {config.threshold:g}", config


def _taylorseer(pipe: Any, prompts: Sequence[str], steps: int, seed: int) -> tuple[str, cachekit.CacheConfig]:
    config = cachekit.TaylorSeerCacheConfig(cache_interval=2, max_order=1)
    return f"{config.cache_interval} steps, order {config.max_order}", config


def _seacache(pipe: Any, prompts: Sequence[str], steps: int, seed: int) -> tuple[str, cachekit.CacheConfig]:
    config = cachekit.SeaCacheConfig(threshold=0.15)
    return f"threshold {config.threshold:g}", config


def _schedule(pipe: Any, prompts: Sequence[str], steps: int, seed: int) -> tuple[str, cachekit.CacheConfig]:
    count = max(1, round(steps / 2))
    profile = cachekit.calibrate(
        pipe, prompts, steps, budgets=[count], held_back=0.0, seed=seed, progress=False, **GUIDANCE
    )
    return f"{count} of {steps} steps", cachekit.ScheduleCacheConfig.from_profile(profile, computed_steps=count)


def _pab(pipe: Any, prompts: Sequence[str], steps: int, seed: int) -> tuple[str, cachekit.CacheConfig]:
    config = cachekit.PyramidAttentionBroadcastConfig(spatial_attention_block_skip_range=2)
    return f"attention, range {config.spatial_attention_block_skip_range}", config


def _fastercache(pipe: Any, prompts: Sequence[str], steps: int, seed: int) -> tuple[str, cachekit.CacheConfig]:
    config = cachekit.FasterCacheConfig()
    return f"guidance, range {config.unconditional_batch_skip_range}", config


def _deepcache(pipe: Any, prompts: Sequence[str], steps: int, seed: int) -> tuple[str, cachekit.CacheConfig]:
    config = cachekit.DeepCacheConfig(cache_interval=2)
    return f"{config.cache_interval} steps", config


def _text_kv(pipe: Any, prompts: Sequence[str], steps: int, seed: int) -> tuple[str, cachekit.CacheConfig]:
    return "exact", cachekit.TextKVCacheConfig()


SHORT = (
    Candidate("FirstBlock", "first_block", _first_block),
    Candidate("MagCache", "magcache", _magcache, prompts=2),
    Candidate("TaylorSeer", "taylorseer", _taylorseer),
)
"""The demo without `--all`."""
EVERY = (
    *SHORT,
    Candidate("SeaCache", "seacache", _seacache),
    Candidate("Schedule", "schedule", _schedule, prompts=8),
    Candidate("PAB", "pab", _pab),
    Candidate("FasterCache", "fastercache", _fastercache),
    Candidate("DeepCache", "deepcache", _deepcache),
    Candidate("TextKV", "text_kv", _text_kv),
)
"""Every strategy that ships."""
