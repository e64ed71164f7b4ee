"""What uncached runs tell besides their trajectories: magnitudes, drifts, noise levels and times, step by step."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from cachekit.api import cached
from cachekit.calibration.trajectory import Trajectory, recorded
from cachekit.engine.stats import Decision, Stats
from cachekit.errors import CacheWarning, UnsupportedModelError
from cachekit.strategies import FirstBlockCacheConfig, MagCacheConfig, ScheduleCacheConfig

Curves = dict[str, tuple[float, ...]]

_MOST_STEPS = 4096


@dataclass(frozen=True)
class Measurements:
    """Curves with one value per step. Empty where something could not be measured.

    Attributes:
        magnitudes: branch -> ratio of the magnitudes of the block stack's residual in this step and the one before (1
            in the first step), for MagCache.
        drifts: branch -> mean |r - r0| / mean |r0| with r the first block's residual and r0 that of the step before (0
            in the first step), the score of FirstBlock.
        latent_drift: the same of the latents.
        sigmas: share of noise in the latents before the step, 0..1, which is what flow matching calls sigma.
        seconds: time of the step in the first call of the pipeline, of `batch` prompts.
        batch: see `seconds`.
        starts: steps at which a denoiser begins its work: 0, and where the second expert of Wan 2.2 takes over.
    """

    magnitudes: Curves = field(default_factory=dict)
    drifts: Curves = field(default_factory=dict)
    latent_drift: tuple[float, ...] = ()
    sigmas: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    batch: int = 0
    starts: tuple[int, ...] = (0,)

    @classmethod
    def joined(cls, parts: Sequence[tuple[Measurements, int]]) -> Measurements:
        """Of several calls, each with its number of prompts: ratios and drifts are averaged, the rest is the first's.

        Ratios multiply, so that their logarithms are averaged.
        """
        first = parts[0][0]
        told = [(part.drifts, count) for part, count in parts if part.drifts]
        latent = _averaged([({"": part.latent_drift}, count) for part, count in parts])
        return cls(
            magnitudes=_averaged([(part.magnitudes, count) for part, count in parts], logarithmic=True),
            drifts=_averaged(told) if told else {},
            latent_drift=latent.get("", ()),
            **{item.name: getattr(first, item.name) for item in fields(cls)[3:]},
        )


def measured(pipe: Any, call: Callable[[], Any], prompts: int, drifts: bool) -> tuple[Trajectory, Measurements]:
    """Run an uncached pipeline, once or twice.

    Args:
        pipe: the pipeline.
        call: runs it.
        prompts: number of prompts that it runs.
        drifts: run it a second time for the drift of the first block.
    """
    try:
        reference, stats = _listened(pipe, MagCacheConfig(calibrate=True), call)
    except UnsupportedModelError:
        reference, stats = _listened(pipe, ScheduleCacheConfig(range(_MOST_STEPS)), call)
    curves = {name: tuple(curve) for name, curve in stats.magnitude_ratios.items()}
    return reference, Measurements(
        magnitudes={name: curve for name, curve in curves.items() if len(curve) == len(reference)},
        drifts=_drifts(pipe, call, len(reference)) if drifts else {},
        latent_drift=_latent_drift(reference),
        sigmas=reference.noise,
        seconds=tuple(reference.seconds),
        batch=prompts,
        starts=_starts(stats),
    )


def _listened(pipe: Any, config: Any, call: Callable[[], Any]) -> tuple[Trajectory, Stats]:
    with _quiet(), cached(pipe, config, progress=False) as handle, recorded(pipe, timed=True) as reference:
        call()
        return reference, handle.stats()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that nothing was reused: nothing shall be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        yield


def _drifts(pipe: Any, call: Callable[[], Any], steps: int) -> Curves:
    """Scores of the first block in a run that computes everything."""
    try:
        with _quiet(), cached(pipe, FirstBlockCacheConfig(threshold=0.0), progress=False) as handle:
            call()
            stats = handle.stats()
    except UnsupportedModelError:
        return {}
    found: dict[str, list[float]] = {}
    for _, decision in _decisions(stats):
        curve = found.setdefault(decision.branch, [0.0] * steps)
        if decision.score is not None and math.isfinite(decision.score) and decision.step < steps:
            curve[decision.step] = decision.score
    return {branch: tuple(curve) for branch, curve in found.items()}


def _latent_drift(reference: Trajectory) -> tuple[float, ...]:
    samples = [step.arguments["sample"].float() for step in reference.steps]
    drifts = [
        (after - before).abs().mean() / before.abs().mean().clamp_min(1e-30)
        for before, after in itertools.pairwise(samples)
    ]
    return (0.0, *(torch.stack(drifts).tolist() if drifts else ()))


def _starts(stats: Stats) -> tuple[int, ...]:
    names = {decision.step: name for name, decision in _decisions(stats)}
    steps = sorted(names)
    return tuple(step for i, step in enumerate(steps) if not i or names[step] != names[steps[i - 1]]) or (0,)


def _decisions(stats: Stats) -> Iterator[tuple[str, Decision]]:
    for name, denoiser in stats.denoisers.items():
        for decision in () if denoiser.last is None else denoiser.last.decisions:
            yield name, decision


def _averaged(parts: Sequence[tuple[Mapping[str, Sequence[float]], int]], logarithmic: bool = False) -> Curves:
    """Mean of curves by branch, weighted; branches that not all parts have, or at other lengths, are left out."""
    names = [
        name for name in parts[0][0] if all(len(part.get(name, ())) == len(parts[0][0][name]) for part, _ in parts)
    ]
    weights = torch.tensor([float(count) for _, count in parts], dtype=torch.float64)
    result: Curves = {}
    for name in names:
        table = torch.tensor([list(part[name]) for part, _ in parts], dtype=torch.float64)
        table = table.log() if logarithmic else table
        mean = (weights / weights.sum()) @ table
        result[name] = tuple((mean.exp() if logarithmic else mean).tolist())
    return result
