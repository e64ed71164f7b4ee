"""Choosing: every strategy at the same cost on prompts that none was tuned on, beside simply fewer steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from cachekit.calibration.candidates import FEWER_STEPS, Candidate, fewer_steps, sources_of, strategy_candidates
from cachekit.calibration.fileio import write_text
from cachekit.calibration.measure import Bench, By, Measured, Prompt
from cachekit.calibration.profile import Profile
from cachekit.calibration.prompts import spread
from cachekit.calibration.rows import Row, columns, row
from cachekit.calibration.split import halves, split
from cachekit.calibration.target import Target
from cachekit.calibration.tune import Found, about_run, explore
from cachekit.calibration.verdict import Verdict, judge
from cachekit.errors import CacheConflictError, CacheKitError
from cachekit.strategies import CacheConfig, Sources, strategy_named, strategy_names

_SLACK = 0.05
"""Part of the speed-up (or tenth of a dB) that may be missing on other prompts than those tuned on."""


@dataclass(frozen=True)
class Recommendation:
    """What to use, and why.

    Attributes:
        target: what was asked for.
        best: the best setting of a cache on the held-back prompts; None when none reaches the target there.
        control: the best setting with simply fewer steps; None when it does not reach the target.
        verdict: whether caching is worth it, and the reasons.
        compared: every setting that was drawn for the held-back prompts, the best first.
        refused: strategy -> why it was not compared.
        notes: what has to be known about the settings.
        about: pipeline, number of held-back prompts, steps, seed and versions.
    """

    target: Target
    best: Measured | None
    control: Measured | None
    verdict: Verdict
    compared: tuple[Measured, ...]
    refused: dict[str, str]
    notes: tuple[str, ...]
    about: dict[str, Any]

    @property
    def worth_it(self) -> bool:
        """False when caching is not worth it; `verdict` says why."""
        return self.verdict.worth_it

    @property
    def config(self) -> CacheConfig:
        """The best config, for `cachekit.enable_cache`; look at `worth_it` first.

        Raises:
            ValueError: no cache reaches the target.
        """
        if self.best is None or self.best.setting.config is None:
            raise ValueError(f"no cache reaches {self.target}: {'; '.join(self.verdict.reasons)}")
        return self.best.setting.config

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; configs as text."""
        return {
            "format": "cachekit.recommendation",
            "target": vars(self.target),
            "worth_it": self.worth_it,
            "reasons": list(self.verdict.reasons),
            "best": None if self.best is None else self.best.to_dict(),
            "control": None if self.control is None else self.control.to_dict(),
            "compared": [measured.to_dict() for measured in self.compared],
            "refused": self.refused,
            "notes": list(self.notes),
            "about": self.about,
        }

    def save(self, path: str | Path) -> Path:
        """Write everything as JSON; returns the path."""
        return write_text(path, json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n")

    @property
    def caption(self) -> str:
        """For what, on what."""
        return f"{self.about['pipeline']} for {self.target}; {self.about['prompts']} held-back prompts"

    def rows(self) -> list[Row]:
        """The settings that were compared as rows of text, the best one marked."""
        return [
            row(measured, "*" if measured is self.best else "", f"{measured.setting.name}: ")
            for measured in self.compared
        ]

    def remarks(self) -> list[str]:
        """What was not compared, the config found, the verdict, and notes."""
        found = [] if self.best is None else [f"* {self.best.setting.config}"]
        return [
            *(f"{name}: {reason}" for name, reason in self.refused.items()),
            *found,
            f"caching is {'' if self.worth_it else 'not '}worth it: {'; '.join(self.verdict.reasons)}",
            *(f"note: {note}" for note in self.notes),
        ]

    def __str__(self) -> str:
        return "\n  ".join([self.caption, *(columns(self.rows()) if self.compared else []), *self.remarks()])


def recommend(
    pipe: Any,
    profile: Profile | Sequence[Prompt],
    prompts: Sequence[Prompt] | None = None,
    *,
    speedup: float | None = None,
    min_psnr: float | None = None,
    by: By = "work",
    strategies: Sequence[str] | None = None,
    num_inference_steps: int | None = None,
    held_back: float = 0.5,
    pictures: int = 8,
    evaluations: int = 8,
    seed: int = 0,
    progress: bool = True,
    **pipeline_kwargs: Any,
) -> Recommendation:
    """Compare all strategies that the pipeline takes, and simply fewer steps, at one cost.

    Each is tuned as by `cachekit.tune` on some prompts; what reaches the target draws other prompts, which neither the
    tuning nor the profile's calibration has seen. There the settings take turns, so that times can be compared.

    Args:
        pipe: a diffusers pipeline without an enabled cache; it is left as it was.
        profile: from `cachekit.calibrate` (schedules and magnitude ratios come from it), or simply prompts; without a
            profile schedules are evenly spread and extrapolated.
        prompts: see `cachekit.tune`. When it is the list that the profile was calibrated with, strategies are tuned on
            the prompts that calibration used and compared on those that it held back.
        speedup: how much faster, see `by`. Exactly one of this and `min_psnr`.
        min_psnr: dB to the uncached picture that 95 % of the pictures reach.
        by: "work" compares floating-point operations of the denoisers, "calls" their computed calls, "time" seconds.
        strategies: names of those to compare; None for all that can be tuned.
        num_inference_steps: steps of the pipeline; None takes the profile's, or 28.
        held_back: share of the prompts to judge by, where no calibration has divided them.
        pictures: at most so many prompts are drawn for tuning, and so many for the comparison.
        evaluations: at most so many settings are tried for each strategy.
        seed: of the noise; the held-back prompts have noise of their own.
        progress: show a progress bar.
        **pipeline_kwargs: whatever the pipeline is called with otherwise (guidance, size, ...).

    Raises:
        ValueError: a bad target or number, too few prompts, or an unknown strategy.
        ProfileMismatchError, CacheConflictError, UnsupportedModelError: the pipeline cannot be cached as it is.
        TypeError: not a pipeline, or one that returns nothing to compare.
    """
    target = Target(speedup, min_psnr, by)
    names = [name for name in strategy_names() if strategy_named(name).tunable is not None]
    if strategies is not None:
        names = [strategy_named(name).name for name in strategies]
    if pictures < 1 or evaluations < 1:
        raise ValueError(f"pictures and evaluations: at least 1, got {pictures!r} and {evaluations!r}")
    if not 0 < held_back < 1:
        raise ValueError(f"held_back: a share between 0 and 1, got {held_back!r}")
    known = profile if isinstance(profile, Profile) else None
    parts = split(pipe, profile, prompts, num_inference_steps, pipeline_kwargs)
    tuned, judged = (parts.known, parts.judged) if parts.known and parts.judged else halves(parts.judged, held_back)
    bench = Bench(pipe, spread(tuned, pictures), parts.steps, seed, pipeline_kwargs)
    sources = sources_of(bench, known)
    searched: dict[str, Found] = {}
    refused: dict[str, str] = {}
    with tqdm(total=(len(names) + 1) * evaluations, unit="setting", disable=not progress) as bar:
        for name in (*names, FEWER_STEPS):
            bar.set_description(f"tuning {name}")
            before = bar.n
            try:
                candidates = _candidates(name, sources, target, parts.steps)
                searched[name] = explore(bench, candidates, target, evaluations, bar.update)
            except CacheConflictError:
                raise
            except (CacheKitError, ValueError) as error:
                refused[name] = f"refused: {error}"
            except RuntimeError as error:
                refused[name] = f"failed: {error}"
            bar.update(max(before + evaluations - bar.n, 0))
    for name, found in searched.items():
        if found.best is None:
            refused[name] = _why(found, target)
    settings = [found.best.setting for found in searched.values() if found.best is not None]
    judges = Bench(pipe, spread(judged, pictures), parts.steps, seed + len(bench), pipeline_kwargs)
    with tqdm(total=len(judges) * len(settings), desc="comparing", unit="picture", disable=not progress) as bar:
        compared = judges.measure(*settings, retime=True, advance=bar.update)
    caches = [measured for measured in compared if measured.setting.config is not None]
    control = next((measured for measured in compared if measured.setting.config is None), None)
    best = target.best(caches, _SLACK)
    order = sorted(compared, key=lambda item: (-item.mean, -item.speedup()))
    notes = [f"{name}: {note}" for name, found in searched.items() if found.best is not None for note in found.notes]
    told = about_run(pipe, judges, seed, pipeline_kwargs)
    verdict = judge(target, best, control, caches, bench.scheduler_steps)
    return Recommendation(target, best, control, verdict, tuple(order), refused, tuple(notes), told)


def _candidates(name: str, sources: Sources, target: Target, steps: int) -> list[Candidate]:
    if name == FEWER_STEPS:
        return [fewer_steps(steps, target)]
    return list(strategy_candidates(strategy_named(name), sources, target, steps, {}))


def _why(found: Found, target: Target) -> str:
    """Why a strategy was tuned in vain."""
    if not any(measured.skips_or_shortens for measured in found.curve):
        return f"never skips: {'; '.join(found.notes)}"
    near = target.nearest(list(found.curve))
    return (
        f"does not reach {target}; nearest: {near.setting.label} with {near.speedup(target.by):.2f}x and "
        f"{near.low:.1f} dB (5th percentile)"
    )
