"""What a strategy says about how it can be made faster: which field to turn, how far, and what must be known first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

Kind = Literal["threshold", "interval", "steps"]


@dataclass(frozen=True)
class Sources:
    """What a strategy may build its configs from.

    Attributes:
        denoisers: component name -> denoiser.
        steps: number of denoiser steps of a run.
        profile: from `cachekit.calibrate`; None without one.
        magnitudes: gives branch -> magnitude ratio of each step, measured when nobody has yet.
    """

    denoisers: Mapping[str, nn.Module]
    steps: int
    profile: Any
    magnitudes: Callable[[], Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class Tunable:
    """The one number that trades fidelity for speed.

    Attributes:
        field: its name in tables; the field that is set, unless `configure` knows better.
        kind: "threshold" is a real number and "interval" a whole one that rise with speed; "steps" is a number of
            computed steps, which falls with it.
        low: smallest value.
        high: largest value; None takes the number of steps.
        start: where a search begins; None begins in the middle.
        choices: the values that there are, where not all from `low` to `high` can be had.
        variants: in a few words -> other fields that go with the number; each is searched. Fields that the user
            sets are left out.
        configure: makes the fields for a value; None sets `field`.
    """

    field: str
    kind: Kind
    low: float
    high: float | None = None
    start: float | None = None
    choices: Callable[[Sources], Sequence[int]] | None = None
    variants: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=lambda: {"": {}})
    configure: Callable[[Any, Sources], Mapping[str, Any]] | None = None

    def fields(self, value: float, sources: Sources) -> dict[str, Any]:
        """The fields that a value stands for."""
        return {self.field: value} if self.configure is None else dict(self.configure(value, sources))
