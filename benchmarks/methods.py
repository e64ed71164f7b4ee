"""What is compared: a name, a setting, and a context manager that enables it on a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import cachekit

SEA_CACHE = ((0.1, 2), (0.25, 2), (0.5, 3), (1.0, 4), (2.0, 6))
"""Thresholds, and reuses in a row at most."""

Enable = Callable[[Any], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Method:
    """One setting of one method.

    Attributes:
        family: what belongs to one curve, such as "cachekit schedule".
        setting: the setting in a few words.
        steps: number of steps of the pipeline.
        enable: makes the context manager inside which the pipeline is cached.
        peer: True when it is not ours.
        project: methods of one project share a pipeline; some leave traces on it that would disturb others.
    """

    family: str
    setting: str
    steps: int
    enable: Enable = nullcontext
    peer: bool = False
    project: str = "cachekit"

    @property
    def key(self) -> str:
        return f"{self.family} | {self.setting}"


def ours(family: str, setting: str, steps: int, config: cachekit.CacheConfig) -> Method:
    """A cachekit config."""

    @contextmanager
    def enable(pipe: Any) -> Iterator[Any]:
        with cachekit.cached(pipe, config, progress=False) as handle:
            yield handle

    return Method(f"cachekit {family}", setting, steps, enable)


def our_methods(
    steps: int, profile: cachekit.Profile, ratios: cachekit.MagnitudeRatios, budgets: list[int]
) -> list[Method]:
    """Our strategies at several settings."""
    found = [
        ours(
            "schedule",
            f"{count} computed",
            steps,
            cachekit.ScheduleCacheConfig.from_profile(profile, computed_steps=count),
        )
        for count in budgets
    ]
    found += [
        ours("first_block", f"threshold {threshold:g}", steps, cachekit.FirstBlockCacheConfig(threshold))
        for threshold in (0.1, 0.2, 0.3, 0.5)
    ]
    found += [
        ours(
            "magcache",
            f"threshold {threshold:g}",
            steps,
            cachekit.MagCacheConfig(
                threshold=threshold, mag_ratios=ratios, num_inference_steps=steps, max_skip_steps=skips
            ),
        )
        for threshold, skips in ((0.06, 3), (0.12, 4), (0.24, 6), (0.5, 8))
    ]
    found += [
        ours(
            "taylorseer",
            f"interval {interval}",
            steps,
            cachekit.TaylorSeerCacheConfig(cache_interval=interval, disable_cache_before_step=warmup),
        )
        for interval, warmup in ((2, 1), (3, 1), (4, 1), (5, 1), (7, 1))
    ]
    found += [
        ours(
            "seacache",
            f"threshold {threshold:g}, at most {skips}",
            steps,
            cachekit.SeaCacheConfig(threshold, max_consecutive_cached=skips),
        )
        for threshold, skips in SEA_CACHE
    ]
    found += [
        ours("pab", f"range {skips}", steps, cachekit.PyramidAttentionBroadcastConfig(skips)) for skips in (2, 3, 4, 6)
    ]
    found += [
        ours(
            "fastercache",
            f"range {skips}",
            steps,
            cachekit.FasterCacheConfig(unconditional_batch_skip_range=skips),
        )
        for skips in (2, 3, 5, 8)
    ]
    return found


def fewer_steps(steps: int) -> list[Method]:
    """The control: no cache, simply fewer steps."""
    counts = sorted({max(2, round(steps / factor)) for factor in (1.5, 1.75, 2, 2.35, 2.8, 3.1, 3.5, 4, 4.7, 5.6, 7)})
    return [Method("fewer steps", f"{count} steps", count) for count in counts]
