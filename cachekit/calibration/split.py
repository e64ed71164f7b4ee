"""Which prompts are for tuning and which for judging, and whether a profile fits the runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cachekit.calibration.identity import identify
from cachekit.calibration.measure import Prompt
from cachekit.calibration.profile import Profile
from cachekit.calibration.prompts import require_pipeline, spread
from cachekit.errors import ProfileMismatchError

_STEPS = 28


@dataclass(frozen=True)
class Split:
    """Prompts.

    Attributes:
        known: those that a calibration has used; empty without one.
        judged: those that none has used.
        steps: `num_inference_steps` of the pipeline.
    """

    known: tuple[Prompt, ...]
    judged: tuple[Prompt, ...]
    steps: int


def split(
    pipe: Any,
    profile: Profile | Sequence[Prompt],
    prompts: Sequence[Prompt] | None,
    steps: int | None,
    arguments: Mapping[str, Any],
) -> Split:
    """Sort prompts by whether a profile has used them, and check that it fits.

    The list that a profile was calibrated with is recognised by its hash; of another list all are taken to be new.

    Raises:
        TypeError: not a pipeline, prompts twice, or a profile without prompts.
        ValueError: no prompts.
        ProfileMismatchError: the profile is of another pipeline, step count or other arguments.
    """
    require_pipeline(pipe)
    if not isinstance(profile, Profile):
        if prompts is not None:
            raise TypeError("give prompts once: as the second argument, or after a profile")
        return Split((), _listed(profile), _STEPS if steps is None else steps)
    if prompts is None:
        raise TypeError("a profile keeps no texts; pass prompts as well, those it was calibrated with or others")
    profile.require(pipe)
    texts = _listed(prompts)
    told = dict(profile.identity.arguments)
    steps = int(told.get("num_inference_steps", _STEPS)) if steps is None else steps
    plain = [text for text in texts if isinstance(text, str)]
    now = identify(pipe, profile.steps, (), {"num_inference_steps": steps, **arguments}, plain)
    names = sorted(told.keys() | now.arguments.keys())
    different = [
        f"{name}={now.arguments.get(name, 'not given')} instead of {told.get(name, 'not given')}"
        for name in names
        if now.arguments.get(name) != told.get(name)
    ]
    if different:
        raise ProfileMismatchError(
            f"the profile was calibrated with other arguments: {'; '.join(different)}. Pass the same or calibrate"
        )
    if len(plain) != len(texts) or now.prompts != profile.identity.prompts:
        return Split((), texts, steps)
    held = set(spread(range(len(texts)), len(texts) - profile.samples))
    known = tuple(text for i, text in enumerate(texts) if i not in held)
    return Split(known, tuple(text for i, text in enumerate(texts) if i in held), steps)


def halves(prompts: Sequence[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts for tuning, and a share of them for judging; each at least one.

    Raises:
        ValueError: fewer than two prompts.
    """
    if len(prompts) < 2:
        raise ValueError("give at least two prompts: some to tune on and others to judge by")
    count = min(max(math.ceil(share * len(prompts)), 1), len(prompts) - 1)
    judged = set(spread(range(len(prompts)), count))
    return [p for i, p in enumerate(prompts) if i not in judged], [p for i, p in enumerate(prompts) if i in judged]


def _listed(prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
    texts = (prompts,) if isinstance(prompts, (str, Mapping)) else tuple(prompts)
    if not texts:
        raise ValueError("prompts is empty; give some of the kind that will be drawn")
    for text in texts:
        if not isinstance(text, (str, Mapping)):
            raise TypeError(f"a prompt is a text or a dict of arguments, got {type(text).__name__}")
    return texts
