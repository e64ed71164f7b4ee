"""A profile at another number of steps, from what was measured, without running a model.

A schedule of N steps visits the same noise levels as one of S steps, at other places. Schedulers either divide the way
from noise to picture into N equal parts of their own scale (the last part ends at the picture), or put their last entry
next to the picture; the recorded noise levels tell which. So each new step has a place between two old ones. Model
outputs are interpolated there (cubic, Lagrange's form), which for inner products means W G W'; the influence of a step
is that of the piece of way that it covers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from cachekit.calibration.front import FrontPoint
from cachekit.calibration.search import shortlist
from cachekit.calibration.surrogate import Surrogate
from cachekit.strategies.gates import resample_ratios

if TYPE_CHECKING:
    from cachekit.calibration.profile import Profile

Array = npt.NDArray[np.float64]

_LEAST, _MOST = 0.5, 2.0
_STARTS = 4
_POINTS = 4
_EVEN = (0.3, 2.0)


def resampled(profile: Profile, steps: int, speedup: float | None, computed_steps: int | None) -> Profile:
    """See :meth:`cachekit.Profile.resampled`."""
    _require(profile, steps)
    count = _count(steps, speedup, computed_steps)
    places, edges = _places(profile.sigmas, steps)
    mixing = interpolation(profile.steps, places)
    gram = mixing @ profile.gram.numpy() @ mixing.T
    influence = _pieces(profile.influence.numpy(), edges)
    estimate = Surrogate(gram, influence, _depth(profile))
    schedule = shortlist(estimate.error, steps, count, _STARTS, seed=0)[0]
    error = 10 * math.log10(max(estimate.error(schedule), 1e-30))
    arguments = {**profile.identity.arguments, "num_inference_steps": str(steps)}
    note = f"resampled from {profile.steps} to {steps} steps: estimated, not run; calibrate at {steps} for the best"
    return replace(
        profile,
        identity=replace(profile.identity, steps=steps, arguments=arguments),
        gram=torch.from_numpy(gram),
        influence=torch.from_numpy(influence),
        magnitudes={name: tuple(resample_ratios(curve, steps)) for name, curve in profile.magnitudes.items()},
        front=(FrontPoint(schedule, estimate.rows(schedule), error),),
        notes=(*profile.notes, note),
        drifts={name: _curve(_pieces(curve, edges)) for name, curve in profile.drifts.items()},
        latent_drift=_curve(_pieces(profile.latent_drift, edges)) if profile.latent_drift else (),
        sigmas=_read_off(profile.sigmas, places),
        seconds=_read_off(profile.seconds, places) if profile.seconds else (),
    )


def interpolation(steps: int, places: Sequence[float]) -> Array:
    """Matrix (places, steps) that reads values at whole steps off at fractional `places`; its rows sum to 1.

    The cubic through the four nearest steps; exact on cubics and at whole steps.
    """
    points = min(_POINTS, steps)
    matrix = np.zeros((len(places), steps))
    for row, place in enumerate(places):
        first = int(np.clip(math.floor(place) - (points // 2 - 1), 0, steps - points))
        nodes = range(first, first + points)
        for node in nodes:
            matrix[row, node] = math.prod((place - other) / (node - other) for other in nodes if other != node)
    return matrix


def _require(profile: Profile, steps: int) -> None:
    """Refuse what cannot be resampled."""
    cure = f"calibrate with num_inference_steps={steps}"
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
        raise ValueError(f"num_inference_steps: a whole number of at least 2, got {steps!r}")
    if not profile.sigmas:
        raise ValueError(f"this profile holds no noise levels (an older file), so its steps cannot be moved; {cure}")
    if not _LEAST <= steps / profile.steps <= _MOST:
        raise ValueError(
            f"a profile of {profile.steps} steps serves {math.ceil(_LEAST * profile.steps)} to "
            f"{math.floor(_MOST * profile.steps)} steps, not {steps}; {cure}"
        )
    if not profile.is_affine:
        raise ValueError(f"{profile.identity.scheduler} is not linear in the model output here; {cure}")
    if len(profile.starts) > 1:
        raise ValueError(f"the denoisers of this pipeline take turns, and the place moves with the steps; {cure}")
    if profile.steps != profile.num_inference_steps or not all(a > b for a, b in itertools.pairwise(profile.sigmas)):
        raise ValueError(
            f"{profile.identity.scheduler} made {profile.steps} steps of {profile.num_inference_steps}, or repeats "
            f"noise levels, so they cannot be moved; {cure}"
        )


def _count(steps: int, speedup: float | None, computed_steps: int | None) -> int:
    if (speedup is None) == (computed_steps is None):
        raise ValueError("give exactly one of speedup and computed_steps")
    if speedup is not None and not (math.isfinite(speedup) and speedup >= 1):
        raise ValueError(f"speedup: a number of at least 1, got {speedup!r}")
    count = math.ceil(steps / speedup - 1e-9) if speedup is not None else computed_steps
    if not isinstance(count, int) or not 1 <= count <= steps:
        raise ValueError(f"computed_steps: from 1 to {steps}, got {computed_steps!r}")
    return count


def _places(sigmas: Sequence[float], steps: int) -> tuple[list[float], list[float]]:
    """Where the new steps lie among the old ones, and where the pieces of way between them begin and end."""
    old = len(sigmas)
    last, before = sigmas[-1], sigmas[-2] - sigmas[-1]
    if _EVEN[0] <= last / before <= _EVEN[1]:
        edges = [old * step / steps for step in range(steps + 1)]
    else:
        edges = [*((old - 1) * step / (steps - 1) for step in range(steps)), float(old)]
    return edges[:-1], edges


def _pieces(values: Sequence[float] | Array, edges: Sequence[float]) -> Array:
    """What is spread over the old steps, summed over the new ones."""
    level = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    result: Array = np.diff(np.interp(edges, np.arange(len(level)), level))
    return result


def _read_off(values: Sequence[float], places: Sequence[float]) -> tuple[float, ...]:
    return _curve(interpolation(len(values), places) @ np.asarray(values, dtype=np.float64))


def _curve(values: Array) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _depth(profile: Profile) -> int:
    return max((len(weights) for point in profile.front for _, weights in point.rows.values()), default=3)
