"""Two profiles of one pipeline, made with different prompts, become one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cachekit.calibration.front import FrontPoint
from cachekit.calibration.surrogate import Surrogate
from cachekit.errors import ProfileMismatchError

if TYPE_CHECKING:
    from cachekit.calibration.profile import Profile


def merged(first: Profile, second: Profile) -> Profile:
    """See :meth:`cachekit.Profile.merge`."""
    differences = first.identity.differences_from(second.identity)
    if first.starts != second.starts:
        differences.append(f"experts take over at steps {list(second.starts)} instead of {list(first.starts)}")
    if differences:
        raise ProfileMismatchError(
            f"these profiles were made for different things and cannot be merged; different: {'; '.join(differences)}"
        )
    if first.identity.prompts == second.identity.prompts:
        raise ValueError("both profiles were made with the same prompts; merging them would count each prompt twice")
    weight = first.samples / (first.samples + second.samples)
    gram = weight * first.gram + (1 - weight) * second.gram
    influence = weight * first.influence + (1 - weight) * second.influence
    estimate = Surrogate(gram.numpy(), influence.numpy(), _depth(first, second), starts=first.starts)
    prompts = sorted((first.identity.prompts, second.identity.prompts))
    return replace(
        first,
        identity=replace(first.identity, prompts=hashlib.sha256("\n".join(prompts).encode()).hexdigest()[:16]),
        gram=gram,
        influence=influence,
        magnitudes=_by_branch(first.magnitudes, second.magnitudes, weight, logarithmic=True),
        drifts=_by_branch(first.drifts, second.drifts, weight),
        latent_drift=_averaged(first.latent_drift, second.latent_drift, weight),
        sigmas=first.sigmas or second.sigmas,
        front=_front(first.front, second.front, estimate),
        samples=first.samples + second.samples,
        notes=(*dict.fromkeys((*first.notes, *second.notes)), "merged from profiles of different prompts"),
        is_affine=first.is_affine and second.is_affine,
    )


def _front(first: Sequence[FrontPoint], second: Sequence[FrontPoint], estimate: Surrogate) -> tuple[FrontPoint, ...]:
    """The better of two schedules with equal numbers of computed steps, by the estimate over the prompts of both."""
    best: dict[int, FrontPoint] = {}
    for point in (*first, *second):
        count = len(point.computed_steps)
        before = best.get(count)
        if before is None or _cost(point, estimate) < _cost(before, estimate):
            best[count] = point
    return tuple(best[count] for count in sorted(best))


def _cost(point: FrontPoint, estimate: Surrogate) -> float:
    return estimate.error_of(point.computed_steps, point.rows)


def _depth(*profiles: Profile) -> int:
    weights = (weights for profile in profiles for point in profile.front for _, weights in point.rows.values())
    return max((len(row) for row in weights), default=2)


def _by_branch(
    first: Mapping[str, Sequence[float]],
    second: Mapping[str, Sequence[float]],
    weight: float,
    logarithmic: bool = False,
) -> dict[str, tuple[float, ...]]:
    """Weighted means; a branch that only one profile has is taken as it is."""
    return {
        branch: _averaged(first.get(branch, ()), second.get(branch, ()), weight, logarithmic)
        for branch in dict.fromkeys((*first, *second))
    }


def _averaged(
    first: Sequence[float], second: Sequence[float], weight: float, logarithmic: bool = False
) -> tuple[float, ...]:
    if not first or not second:
        return tuple(first or second)
    if logarithmic:
        return tuple(a**weight * b ** (1 - weight) for a, b in zip(first, second, strict=True))
    return tuple(weight * a + (1 - weight) * b for a, b in zip(first, second, strict=True))
