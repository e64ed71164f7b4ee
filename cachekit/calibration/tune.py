"""Tuning: the setting of a strategy for a speed or a quality, by bisection on real runs, with the whole curve."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from tqdm.auto import tqdm

from cachekit.calibration.bisection import Threshold, bracket
from cachekit.calibration.candidates import Candidate, sources_of, strategy_candidates
from cachekit.calibration.cliffs import Cliff, find_cliffs
from cachekit.calibration.fileio import write_text
from cachekit.calibration.measure import Bench, By, Measured, Prompt
from cachekit.calibration.profile import Profile
from cachekit.calibration.prompts import spread
from cachekit.calibration.rows import Row, columns, row
from cachekit.calibration.split import split
from cachekit.calibration.target import Target
from cachekit.strategies import CacheConfig, strategy_named

_BESIDE = 1.05
_PROBES = 2


@dataclass(frozen=True)
class TuneResult:
    """What was found, and everything that was measured on the way.

    Attributes:
        strategy: its name.
        target: what was asked for.
        best: the setting to use; None when no setting reaches the target.
        curve: every setting that was measured, by rising speed.
        cliffs: small changes of a threshold with large effects.
        notes: what has to be known about it.
        about: pipeline, number of prompts, steps, seed and versions.
    """

    strategy: str
    target: Target
    best: Measured | None
    curve: tuple[Measured, ...]
    cliffs: tuple[Cliff, ...]
    notes: tuple[str, ...]
    about: dict[str, Any]

    @property
    def config(self) -> CacheConfig:
        """The config for `cachekit.enable_cache`.

        Raises:
            ValueError: no setting reaches the target.
        """
        if self.best is None or self.best.setting.config is None:
            raise ValueError(self.missed)
        return self.best.setting.config

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; configs as text."""
        return {
            "format": "cachekit.tune",
            "strategy": self.strategy,
            "target": vars(self.target),
            "best": None if self.best is None else self.best.to_dict(),
            "curve": [measured.to_dict() for measured in self.curve],
            "cliffs": [cliff.to_dict() for cliff in self.cliffs],
            "notes": list(self.notes),
            "about": self.about,
        }

    def save(self, path: str | Path) -> Path:
        """Write everything as JSON; returns the path."""
        return write_text(path, json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n")

    @property
    def caption(self) -> str:
        """What was tuned, for what, on what."""
        return f"{self.strategy} on {self.about['pipeline']} for {self.target}; {self.about['prompts']} prompts"

    def rows(self) -> list[Row]:
        """The curve as rows of text, the setting found marked."""
        return [row(measured, "*" if measured is self.best else "") for measured in self.curve]

    def remarks(self) -> list[str]:
        """Cliffs, the config found, and notes."""
        found = [] if self.best is None else [f"* {self.best.setting.config}"]
        return [*map(str, self.cliffs), *found, *(f"note: {note}" for note in self.notes)]

    def __str__(self) -> str:
        missed = [] if self.best is not None else [self.missed]
        return "\n  ".join([self.caption, *columns(self.rows()), *self.remarks(), *missed])

    @property
    def missed(self) -> str:
        """How near the target the settings come."""
        near = self.target.nearest(list(self.curve))
        return (
            f"no setting of {self.strategy} reaches {self.target}; the nearest is {near.setting.label} with "
            f"{near.speedup(self.target.by):.2f}x and {near.low:.1f} dB (5th percentile)"
        )


@dataclass(frozen=True)
class Found:
    """What the search for a strategy's setting gave."""

    best: Measured | None
    curve: tuple[Measured, ...]
    cliffs: tuple[Cliff, ...]
    notes: tuple[str, ...]


def tune(
    pipe: Any,
    profile: Profile | Sequence[Prompt],
    prompts: Sequence[Prompt] | None = None,
    *,
    strategy: str = "first_block",
    speedup: float | None = None,
    min_psnr: float | None = None,
    by: By = "work",
    num_inference_steps: int | None = None,
    pictures: int = 8,
    evaluations: int = 16,
    seed: int = 0,
    progress: bool = True,
    fields: dict[str, Any] | None = None,
    **pipeline_kwargs: Any,
) -> TuneResult:
    """Find the setting of a strategy that is as fast, or as good, as asked for.

    Every setting that is tried draws the prompts and is compared with their uncached pictures. A search brackets the
    target and halves the bracket; where a strategy has variants (a shorter warm-up, a higher cap) each is searched.
    As far as evaluations are left, two more are measured beside a threshold that was found, so that a cliff shows.

    Args:
        pipe: a diffusers pipeline without an enabled cache; it is left as it was.
        profile: from `cachekit.calibrate` (schedules and magnitude ratios come from it), or simply prompts.
        prompts: what to draw, when a profile is given: other prompts of the same kind, or the very list that it was
            calibrated with, of which those that it held back are taken. Texts, or for pipelines that need more than a
            text a dict of arguments for one picture.
        strategy: name of a strategy.
        speedup: how much faster, see `by`. Exactly one of this and `min_psnr`.
        min_psnr: dB to the uncached picture that 95 % of the pictures reach.
        by: "work" compares floating-point operations of the denoisers, "calls" their computed calls, "time" seconds.
        num_inference_steps: steps of the pipeline; None takes the profile's, or 28.
        pictures: at most so many prompts are drawn, evenly spread.
        evaluations: at most so many settings are tried.
        seed: prompt i starts from the noise of seed + i.
        progress: show a progress bar.
        fields: fields of the config that stay as they are.
        **pipeline_kwargs: whatever the pipeline is called with otherwise (guidance, size, ...).

    Returns:
        The result; `result.config` is for `cachekit.enable_cache`, `print(result)` shows the curve.

    Raises:
        ValueError: a bad target or number, no prompts, or a strategy that has nothing to tune.
        UnsupportedModelError, CacheConflictError, ProfileMismatchError: as from `cachekit.enable_cache`.
        TypeError: not a pipeline, or one that returns nothing to compare.
    """
    target = Target(speedup, min_psnr, by)
    chosen = strategy_named(strategy)
    if pictures < 1 or evaluations < 1:
        raise ValueError(f"pictures and evaluations: at least 1, got {pictures!r} and {evaluations!r}")
    known = profile if isinstance(profile, Profile) else None
    parts = split(pipe, profile, prompts, num_inference_steps, pipeline_kwargs)
    bench = Bench(pipe, spread(parts.judged or parts.known, pictures), parts.steps, seed, pipeline_kwargs)
    candidates = list(strategy_candidates(chosen, sources_of(bench, known), target, parts.steps, fields or {}))
    with tqdm(total=evaluations, desc=f"tuning {strategy}", unit="setting", disable=not progress) as bar:
        found = explore(bench, candidates, target, evaluations, bar.update)
    about = about_run(pipe, bench, seed, pipeline_kwargs)
    return TuneResult(strategy, target, found.best, found.curve, found.cliffs, found.notes, about)


def explore(
    bench: Bench, candidates: Sequence[Candidate], target: Target, evaluations: int, advance: Callable[[], Any]
) -> Found:
    """Search every axis; the axes share the evaluations.

    Raises:
        CacheKitError, ValueError, TypeError: the first setting of the first axis cannot be used on this pipeline.
    """
    curves: list[dict[float, Measured]] = []
    left = evaluations
    for place, candidate in enumerate(candidates):
        share = math.ceil(left / (len(candidates) - place))
        curve = _search(bench, candidate, target, share, advance)
        curves.append(curve)
        left -= len(curve)
    best = target.best([measured for curve in curves for measured in curve.values()])
    for candidate, curve in zip(candidates, curves, strict=True):
        if best is not None and isinstance(candidate.axis, Threshold) and best in curve.values():
            for faster in (True, False)[: min(_PROBES, left)]:
                value = candidate.axis.beside(best.setting.value, faster, _BESIDE)
                if value is not None and value not in curve:
                    curve[value] = bench.measure(candidate.setting(value))[0]
                    advance()
    best = target.best([measured for curve in curves for measured in curve.values()])
    rising = [[curve[value] for value in sorted(curve)] for curve in curves]
    cliffs = [
        cliff
        for candidate, curve in zip(candidates, rising, strict=True)
        if isinstance(candidate.axis, Threshold)
        for cliff in find_cliffs(curve)
    ]
    whole = sorted((item for curve in rising for item in curve), key=lambda item: (item.speedup(), -item.mean))
    return Found(best, tuple(whole), tuple(cliffs), _notes(bench, best, whole, cliffs))


def _search(
    bench: Bench, candidate: Candidate, target: Target, budget: int, advance: Callable[[], Any]
) -> dict[float, Measured]:
    curve: dict[float, Measured] = {}

    def at(value: float) -> Measured:
        if value not in curve:
            curve[value] = bench.measure(candidate.setting(value))[0]
            advance()
        return curve[value]

    reserve = _PROBES if isinstance(candidate.axis, Threshold) and budget > 4 * _PROBES else 0
    bracket(
        candidate.axis,
        lambda value: target.too_fast(at(value)),
        lambda value: target.exact(at(value)),
        budget - reserve,
    )
    return curve


def _notes(bench: Bench, best: Measured | None, curve: Sequence[Measured], cliffs: Sequence[Cliff]) -> tuple[str, ...]:
    notes = []
    if curve and not any(item.skips_or_shortens for item in curve):
        reasons = list(dict.fromkeys(reason for item in curve for reason in item.reasons))
        notes.append(f"no call was ever reused ({'; '.join(reasons[:3])})")
    for cliff in cliffs:
        if best is not None and best in (cliff.careful, cliff.fast):
            side = "before" if best is cliff.careful else "behind"
            notes.append(f"the setting found stands {side} a cliff, so other prompts may fall on its other side")
    if any(item.worst == 0.0 for item in curve):
        notes.append("a picture with 0 dB has nothing to do with the uncached one, or holds NaN")
    if not bench.repeats:
        notes.append("the uncached pipeline does not repeat its own result bit by bit")
    if not bench.pictures:
        notes.append("the pipeline gives no pictures in [0, 1]; PSNR is that of what it gives, peak = its range")
    return tuple(dict.fromkeys(notes))


def about_run(pipe: Any, bench: Bench, seed: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a result was measured on, as plain values."""
    return {
        "pipeline": type(pipe).__name__,
        "scheduler": type(getattr(pipe, "scheduler", None)).__name__,
        "prompts": len(bench),
        "num_inference_steps": bench.steps,
        "uncached_calls": bench.calls,
        "compares": "pictures" if bench.pictures else "results",
        "seed": seed,
        "arguments": {name: str(value) for name, value in arguments.items()},
        "versions": {"torch": str(torch.__version__), "diffusers": diffusers.__version__},
    }
