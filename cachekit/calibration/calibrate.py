"""Calibration: from uncached runs over some prompts to a front of schedules."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from cachekit.calibration.fit import plain_rows
from cachekit.calibration.front import FrontPoint, Row
from cachekit.calibration.identity import identify
from cachekit.calibration.influence import NotAffineError, influences
from cachekit.calibration.profile import Profile
from cachekit.calibration.prompts import require_pipeline, spread
from cachekit.calibration.runs import Batch, relative_errors
from cachekit.calibration.search import Memo, Schedule, rank_correlation, refine, shortlist
from cachekit.calibration.search import spread as even
from cachekit.calibration.stochastic import draws_noise, require_predictable
from cachekit.calibration.surrogate import Surrogate, gram_matrix
from cachekit.metrics import psnr

_STARTS = 8
_SHORTLISTED = 3
_HELD_BACK_SEED = 1_000_003


def calibrate(
    pipe: Any,
    prompts: Sequence[str],
    num_inference_steps: int = 28,
    *,
    budgets: Sequence[int] | None = None,
    held_back: float = 0.25,
    evaluations: int = 4,
    depth: int = 3,
    seed: int = 0,
    batch_size: int | None = None,
    resume: str | Path | None = None,
    progress: bool = True,
    **pipeline_kwargs: Any,
) -> Profile:
    """Find out, for every number of computed steps, which steps to compute and how to predict the others.

    The uncached pipeline runs once over the calibration prompts. For each budget a cheap estimate
    (:mod:`cachekit.calibration.surrogate`) proposes schedules; the best ones are then run for real, with coefficients
    fitted in closed loop (:mod:`cachekit.calibration.fit`), and improved by local moves. The prompts that were held
    back are drawn with every schedule found and compared with their uncached pictures.

    Args:
        pipe: a diffusers pipeline without an enabled cache; it is left as it was.
        prompts: texts of the kind that will be drawn. Tens are better than a few: the worst prompt is what overfits.
        num_inference_steps: number of steps, as the pipeline counts them.
        budgets: numbers of computed steps; None for all from an eighth to four fifths of the steps.
        held_back: share of the prompts that are kept for judging the result; 0 to judge nothing.
        evaluations: further schedules that are run per budget in the local search.
        depth: number of results that a prediction combines.
        seed: of the noise and of the search.
        batch_size: prompts of one pipeline call, which bounds the memory; None runs all of a group at once. Results
            differ a little, and the runs with fitted coefficients take up to twice as long.
        resume: file to continue from and to write to after each budget; None keeps nothing.
        progress: show a progress bar.
        **pipeline_kwargs: whatever the pipeline is called with otherwise (guidance, size, negative prompt, ...).

    Returns:
        A profile; `ScheduleCacheConfig.from_profile(profile, speedup=2.5)` uses it.

    Raises:
        ValueError: no prompts, a bad budget, a pipeline without a scheduler, an uncached run that ends in NaN, or a
            sampler whose fresh noise leaves nothing to predict from (few-step LCM), with the figure.
        TypeError: not a pipeline.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    require_pipeline(pipe)
    known, judged = _split(texts, held_back)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size: a number of prompts from 1, or None for all at once, got {batch_size!r}")
    batch = Batch(pipe, known, num_inference_steps, seed, pipeline_kwargs, depth, batch_size)
    batch.run_uncached()
    steps, measured = len(batch.reference), batch.measurements
    counts = _budgets(budgets, steps, len(measured.starts))
    shape = tuple(batch.reference.final.shape[1:])
    told = {"num_inference_steps": num_inference_steps, **pipeline_kwargs}
    identity = identify(pipe, steps, shape, told, texts)
    done = _earlier(resume, identity.to_json())
    notes: list[str] = []
    try:
        influence, fitted = influences(batch.reference), True
    except NotAffineError as error:
        influence, fitted = [1.0 / steps] * steps, False
        notes.append(f"{error}; skipped steps are extrapolated instead")
    if draws_noise(batch.reference):
        half = max(math.ceil(steps / 2), len(measured.starts))
        trial = batch.errors(even(steps, half, measured.starts), fitted)
        require_predictable(batch.reference, relative_errors(trial, batch.references), half)
    gram = gram_matrix(*batch.references)
    surrogate = Surrogate(gram, np.array(influence), depth, starts=measured.starts)
    judge = _Judge(replace(batch, prompts=judged, seed=seed + _HELD_BACK_SEED)) if judged else None

    def profile(front: dict[int, FrontPoint]) -> Profile:
        points = tuple(front[count] for count in sorted(front))
        influences_found = torch.tensor(influence, dtype=torch.float64)
        return Profile(
            identity=identity,
            gram=torch.from_numpy(gram),
            influence=influences_found,
            front=points,
            samples=len(known),
            notes=tuple(notes),
            is_affine=fitted,
            **{item.name: getattr(measured, item.name) for item in fields(measured)},
        )

    correlations: list[float] = []
    with tqdm(total=len(counts), desc="calibrating", unit="budget", disable=not progress) as bar:
        for count in counts:
            if count not in done:
                schedule, memo = _search(batch, surrogate, count, evaluations, seed, fitted)
                correlations.append(
                    rank_correlation([surrogate.error(item) for item in memo.known], [*memo.known.values()])
                )
                rows, reached = _best_rows(batch, schedule, memo.known[schedule], depth, fitted)
                done[count] = FrontPoint(schedule, rows, reached, () if judge is None else judge(schedule, rows))
                if resume is not None:
                    profile(done).save(resume)
            bar.update()
    told_ranks = [value for value in correlations if not math.isnan(value)]
    if told_ranks:
        notes.append(
            f"rank correlation of the estimate with real runs among the schedules that were run: "
            f"{np.mean(told_ranks):.2f} on average"
        )
    return profile({count: done[count] for count in counts})


class _Judge:
    """Compares pictures of held-back prompts with their uncached ones."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._uncached = batch.images()

    def __call__(self, schedule: Schedule, rows: dict[int, Any]) -> tuple[float, ...]:
        drawn = self._batch.images(schedule, rows)
        return tuple(psnr(a.clamp(0, 1), b.clamp(0, 1)) for a, b in zip(self._uncached, drawn, strict=True))


def _search(
    batch: Batch, surrogate: Surrogate, count: int, evaluations: int, seed: int, fitted: bool
) -> tuple[Schedule, Memo]:
    """The best schedule found with `count` computed steps, and everything that was run for it."""
    memo = Memo(lambda schedule: _mean_decibels(batch.errors(schedule, fitted)))
    fixed = surrogate.starts
    for schedule in shortlist(surrogate.error, surrogate.steps, count, _STARTS, seed, fixed)[:_SHORTLISTED]:
        memo(schedule)
    return refine(memo, memo.best(), surrogate.steps, evaluations, surrogate.error, fixed), memo


def _best_rows(
    batch: Batch, schedule: Schedule, error: float, depth: int, fitted: bool
) -> tuple[dict[int, Row], float]:
    """The coefficients for a schedule, and their error: never worse than those of extrapolation and of reuse.

    The fit minimises the error step by step; where that does not carry through to the final latents, plain weights
    take its place.
    """
    best = batch.rows.get(schedule, {}), error
    for order in (1, 0) if fitted else (0,):
        plain = _mean_decibels(batch.errors(schedule, fitted=False, order=order))
        if plain < best[1]:
            best = plain_rows(schedule, len(batch.reference), depth, order, batch.measurements.starts), plain
    return best


def _mean_decibels(errors: torch.Tensor) -> float:
    return float(10 * errors.clamp_min(1e-30).log10().mean())


def _split(texts: Sequence[str], held_back: float) -> tuple[list[str], list[str]]:
    """Prompts to calibrate on, and every n-th one to judge by."""
    if not texts:
        raise ValueError("prompts is empty; give some tens of the kind that will be drawn")
    if not 0 <= held_back < 1:
        raise ValueError(f"held_back: a share from 0 to less than 1, got {held_back!r}")
    count = min(math.ceil(held_back * len(texts)), len(texts) - 1)
    judged = set(spread(range(len(texts)), count))
    return [t for i, t in enumerate(texts) if i not in judged], [t for i, t in enumerate(texts) if i in judged]


def _budgets(budgets: Sequence[int] | None, steps: int, least: int) -> list[int]:
    if budgets is None:
        return list(range(max(2, least, steps // 8), max(3, least + 1, math.ceil(0.8 * steps))))
    counts = sorted(set(budgets))
    if not counts or counts[0] < least or counts[-1] > steps:
        why = " (each expert computes its first step)" if least > 1 else ""
        raise ValueError(f"budgets: numbers of computed steps from {least} to {steps}{why}, got {list(budgets)}")
    return counts


def _earlier(resume: str | Path | None, identity: str) -> dict[int, FrontPoint]:
    """What an interrupted calibration of the same pipeline and prompts has found already."""
    if resume is None or not Path(resume).is_file():
        return {}
    with contextlib.suppress(ValueError):
        earlier = Profile.load(resume)
        if earlier.identity.to_json() == identity:
            return {len(point.computed_steps): point for point in earlier.front}
    return {}
