"""Runs the checks of every strategy on one case and says what came out."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch

import cachekit as ck

from . import checks
from .cases import cases

NOTHING_KEPT = (
    f"{checks.NOTHING_CONSTANT}, and said so: what becomes keys and values of the text depends on the step; all calls "
    "are computed, bit-identical"
)


@dataclass(frozen=True)
class Outcome:
    """What one strategy did on one case.

    Attributes:
        reused, calls: of a run with settings that skip whenever they may, all checks passed.
        reason: why nothing can be reused; the checks passed, or the strategy refused before changing anything.
        failure: the first line of what went wrong; "" when nothing did.
    """

    reused: int = 0
    calls: int = 0
    reason: str = ""
    failure: str = ""


@dataclass(frozen=True)
class CaseOutcomes:
    """One case: the block calls that a FirstBlock reuse saves, of all in the stacks, and strategy -> outcome."""

    case: str
    cls: str
    blocks: str
    strategies: dict[str, Outcome]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CaseOutcomes:
        """The opposite of `to_dict`."""
        return cls(**{**values, "strategies": {name: Outcome(**item) for name, item in values["strategies"].items()}})


def outcomes_of(name: str) -> CaseOutcomes:
    """Every strategy on the case of that name, in this process, on one thread."""
    torch.set_num_threads(1)
    case = next(case for case in cases() if case.name == name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject = checks.Subject.of(case)
        found = {settings.name: outcome(subject, settings) for settings in checks.STRATEGIES.values()}
        return CaseOutcomes(name, case.cls.__name__, saved_blocks(subject), found)


def outcome(subject: checks.Subject, settings: checks.Settings) -> Outcome:
    """One strategy on one case."""
    case = subject.case
    try:
        checks.nothing_to_skip(subject, settings)
        reused, calls = checks.skips_and_repeats(subject, settings)
        checks.frozen_inputs_are_exact(subject, settings)
        if case.supports_batch and case.uses_conditioning:
            checks.batched_equals_two_calls(subject, settings)
        checks.restores(subject)
    except ck.UnsupportedModelError as error:
        checks.restores(subject)
        return Outcome(reason=f"refused: {error}".replace(f"{case.cls.__name__} ", "it "))
    except Exception as error:
        ck.disable_cache(subject.model)
        return Outcome(failure=f"{type(error).__name__}: {error}".splitlines()[0])
    if not reused:
        return Outcome(0, calls, reason=NOTHING_KEPT)
    return Outcome(reused, calls)


def saved_blocks(subject: checks.Subject) -> str:
    """Block calls that a FirstBlock reuse saves, of all in the stacks."""
    settings = checks.STRATEGIES["first_block"]
    with checks.cached(subject, settings.never):
        checks.run(subject.case, subject.model, 2)
        layout = checks.layout_of(subject.model, "cond")
    return f"{layout.skippable} of {len(layout.places)}"
