"""Every strategy on every denoiser of the installed diffusers, on moving inputs, in both guidance styles."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

import cachekit as ck

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
# No attention that can be hooked: its projections are functions of the block, or there is none.
NO_ATTENTION: frozenset[str] = frozenset()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.lru_cache(maxsize=2)
def subject_of(name: str) -> checks.Subject:
    return checks.Subject.of(ALL[name])


@pytest.mark.parametrize("name", ALL)
def test_shared_loop(name: str) -> None:
    """Contracts 1-4, 6 and 9 in one loop per class and strategy."""
    subject = subject_of(name)
    for settings in checks.STRATEGIES.values():
        if settings.name == "taylorseer-attention" and name in NO_ATTENTION:
            with pytest.raises(ck.UnsupportedModelError, match="attention"):
                ck.enable_cache(subject.model, settings.always)
            continue
        if checks.is_refused(subject, settings):
            continue
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
        if (settings.name == "taylorseer-attention" and name in NO_ATTENTION) or settings.refuses(subject.case):
            continue
        checks.aborted_runs_do_not_leak(subject, settings)
    checks.copies_are_plain(subject, checks.STRATEGIES["first_block"])
    checks.restores(subject)


def test_exemplars_exist() -> None:
    assert set(EXEMPLARS) <= set(ALL)
