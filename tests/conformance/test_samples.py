"""Samples of a batch that decide separately, on every denoiser: each comes out as it does alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import cachekit as ck
from cachekit.engine.rules import GateContext, Guards, Measure, Rule, StackSpec, Verdict
from cachekit.strategies.base import CacheConfig, config_class, strategy
from cachekit.strategies.predictors import Taylor

from . import checks
from .cases import run
from .test_contracts import ALL, EXEMPLARS, FULL, subject_of

STEPS = checks.STEPS
SHARED = {
    **dict.fromkeys(("latte", "unet-3d-condition", "i2vgen-xl", "unet-motion", "unet-spatio-temporal"), "no dimension"),
    "ernie-image": "no dimension",  # the batch is the second one
    "prior": "unclear",  # latents of two dimensions
    "minimax-h3": "part of the batch",  # a table with one row a sample, and indices into it
    "qwen-image-edit": "part of the batch",  # lists with one element a sample
    "qwen-image-21": "part of the batch",
}
"""One decision holds for all samples, and what the statistics say about it."""


@config_class
class TurnsConfig(CacheConfig):
    """Test strategy: sample i of a batch computes the steps s with (s + i) % 3 == 0; without, branch i does."""

    per_sample: bool = False


@dataclass
class _Turns:
    seen: list[int] = field(default_factory=list)

    def measure(self, context: GateContext) -> Measure:
        self.seen.append(context.now.step)
        sample = self.seen.count(context.now.step) - 1
        return Measure(None, lambda score: Verdict((context.now.step + sample) % 3 != 0))

    def decide(self, context: GateContext) -> Verdict:
        sample = ("cond", "uncond").index(context.branch)
        return Verdict((context.now.step + sample) % 3 != 0)


@strategy("turns", TurnsConfig)
def turns(config: TurnsConfig, denoiser: nn.Module) -> list[Rule]:
    """Forced decisions."""
    return [Rule(StackSpec(probe=True), _Turns(), Taylor(1), Guards(), per_sample=config.per_sample)]


@contextmanager
def quiet(model: nn.Module, config: CacheConfig) -> Iterator[ck.Handle]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ck.CacheWarning)
        with ck.cached(model, config) as handle:
            yield handle


@pytest.mark.parametrize("name", FULL)
def test_each_sample_comes_out_as_alone(name: str) -> None:
    subject = subject_of(name)
    case, model = subject.case, subject.model
    if not case.supports_batch:
        pytest.skip(case.batch_note)
    if not case.uses_conditioning:
        pytest.skip("two calls with equal conditioning are no two branches")
    with quiet(model, TurnsConfig()):
        alone = run(case, model, STEPS)
    with quiet(model, TurnsConfig(per_sample=True)) as handle:
        outputs = run(case, model, STEPS, batched_cfg=True)
        stats = handle.stats().last
    assert stats is not None
    if name in SHARED:
        assert not any(0 < sum(decision.reused_samples) < len(decision.reused_samples) for decision in stats.decisions)
        assert [SHARED[name] in note for note in stats.notes] == [True]
        assert all(torch.isfinite(output).all() for output in outputs)
        return
    assert not stats.notes
    assert sum(sum(decision.reused_samples) == 1 for decision in stats.decisions) >= 4
    for step, output in enumerate(outputs):
        for sample, row in enumerate(output.chunk(2)):
            expected = alone[2 * step + sample]
            torch.testing.assert_close(row, expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()) + 1e-5)
    checks.restores(subject)


def test_names_exist() -> None:
    assert set(SHARED) <= set(ALL)
    assert set(SHARED) & set(EXEMPLARS)
