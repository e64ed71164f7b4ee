"""Every strategy on every denoiser of the installed diffusers, on moving inputs, in both guidance styles."""

from __future__ import annotations

import functools

import pytest

from . import checks
from .cases import cases

# Structurally different ones; `make conformance` runs the full set of contracts on all.
EXEMPLARS = (
    "flux",
    "flux2",
    "sd3",
    "wan-vace",
    "latte",
    "consisid",
    "hidream",
    "z-image",
    "hunyuan-video",
    "chroma-control",
    "motif-video-decoder",
    "rfd4-proteina-recycled",
    "cosmos3",
    "unet-2d-condition",
)
ALL = {case.name: case for case in cases()}


@functools.lru_cache(maxsize=2)
def subject_of(name: str) -> checks.Subject:
    return checks.Subject.of(ALL[name])


@pytest.mark.parametrize("name", ALL)
def test_shared_loop(name: str) -> None:
    """Contracts 1-4, 6 and 9 in one loop per class and strategy."""
    subject = subject_of(name)
    for settings in checks.STRATEGIES.values():
        checks.nothing_to_skip(subject, settings)
        checks.skips_and_repeats(subject, settings)
        checks.frozen_inputs_are_exact(subject, settings)
        if subject.case.supports_batch and subject.case.uses_conditioning:
            checks.batched_equals_two_calls(subject, settings)
    checks.restores(subject)


FULL = [pytest.param(name, marks=() if name in EXEMPLARS else (pytest.mark.conformance_full,)) for name in ALL]


@pytest.mark.parametrize("name", FULL)
def test_remaining_contracts(name: str) -> None:
    """Aborted runs, other sizes and batches in between, copies made while enabled."""
    subject = subject_of(name)
    for settings in checks.STRATEGIES.values():
        checks.aborted_runs_do_not_leak(subject, settings)
    checks.copies_are_plain(subject, checks.STRATEGIES["first_block"])
    checks.restores(subject)


def test_exemplars_exist() -> None:
    assert set(EXEMPLARS) <= set(ALL)
