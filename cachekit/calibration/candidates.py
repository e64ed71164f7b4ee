"""What can be tuned: every strategy that says how, and simply fewer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cachekit.calibration.bisection import Axis, Threshold, whole
from cachekit.calibration.measure import Bench, Setting
from cachekit.calibration.target import Target
from cachekit.engine.discovery import find_denoisers
from cachekit.strategies import MagCacheConfig, Sources, Strategy

FEWER_STEPS = "fewer steps"
_MAGNITUDE_SAMPLES = 4


@dataclass(frozen=True)
class Candidate:
    """One axis of settings.

    Attributes:
        name: of the strategy, or `FEWER_STEPS`.
        axis: where its number may lie.
        setting: value -> setting; raises for what the strategy does not accept.
    """

    name: str
    axis: Axis
    setting: Callable[[float], Setting]


def strategy_candidates(
    strategy: Strategy, sources: Sources, target: Target, steps: int, overrides: Mapping[str, Any]
) -> Iterator[Candidate]:
    """The axes of a strategy, one for each variant.

    Args:
        strategy: one with a `tunable`.
        sources: what it may build from.
        target: tells where whole numbers begin.
        steps: `num_inference_steps` of the pipeline.
        overrides: fields that stay as they are.

    Raises:
        ValueError: the number itself is among the overrides, or no strategy lets it be tuned.
    """
    tunable = strategy.tunable
    if tunable is None:
        raise ValueError(f"{strategy.name} has no number that trades fidelity for speed, so there is nothing to tune")
    if tunable.field in overrides:
        raise ValueError(f"{tunable.field} is what is tuned; leave it out, or enable the cache with it as it is")
    high = tunable.high or sources.steps
    if tunable.kind == "threshold":
        axis: Axis = Threshold(tunable.low, high, tunable.start or math.sqrt(tunable.low * high))
    else:
        values = range(int(tunable.low), int(high)) if tunable.choices is None else tunable.choices(sources)
        if not values:
            raise ValueError(f"{strategy.name}: a run of {sources.steps} steps leaves nothing to choose")
        factor = target.speedup or 2.0
        steps_like = tunable.kind == "steps"
        axis = whole(list(values), not steps_like, sources.steps / factor if steps_like else factor)
    seen: list[dict[str, Any]] = []
    for words, variant in tunable.variants.items():
        extra = {name: value for name, value in variant.items() if name not in overrides}
        if extra in seen:
            continue
        seen.append(extra)

        def setting(value: float, words: str = words, extra: dict[str, Any] = extra) -> Setting:
            fields = {**tunable.fields(value, sources), **extra, **overrides}
            label = f"{tunable.field}={value:g}" + f", {words}" * bool(words)
            return Setting(strategy.name, value, label, steps, strategy.config_class(**fields))

        yield Candidate(strategy.name, axis, setting)


def fewer_steps(steps: int, target: Target) -> Candidate:
    """The control: no cache, simply fewer steps."""

    def setting(value: float) -> Setting:
        return Setting(FEWER_STEPS, value, f"{int(value)} steps", int(value), None)

    axis = whole(list(range(1, max(steps, 2))), False, math.floor(steps / (target.speedup or 2.0)))
    return Candidate(FEWER_STEPS, axis, setting)


def sources_of(bench: Bench, profile: Any) -> Sources:
    """What strategies may build from: the profile's magnitude ratios, or those of the first prompts when asked for."""

    @lru_cache(maxsize=1)
    def magnitudes() -> dict[str, tuple[float, ...]]:
        known: dict[str, tuple[float, ...]] = dict(profile.magnitudes) if profile is not None else {}
        return known or bench.magnitudes(
            MagCacheConfig(calibrate=True, num_inference_steps=bench.steps), _MAGNITUDE_SAMPLES
        )

    return Sources(find_denoisers(bench.pipe), bench.scheduler_steps, profile, magnitudes)
