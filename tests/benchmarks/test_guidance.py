"""`benchmarks.guidance`: what it measures."""

from __future__ import annotations

import pytest
import torch

from benchmarks import guidance
from cachekit import demo
from tests.pipelines.families import flux


def test_agreement_of_an_effect_with_itself_turned_and_stretched() -> None:
    effect = torch.tensor([3.0, 4.0])
    assert guidance.agreement(effect, effect) == (1.0, 1.0)
    assert guidance.agreement(effect, -2 * effect) == (-1.0, 2.0)
    assert guidance.agreement(effect, torch.tensor([-4.0, 3.0])) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("cosine", "ratio", "passes"), [(0.9, 1.0, True), (0.89, 1.0, False), (1.0, 0.89, False), (1.0, 1.11, False)]
)
def test_the_worst_prompt_counts(cosine: float, ratio: float, passes: bool) -> None:
    kept = guidance.Kept(demo.Method("", "", 4), [1.0, cosine], [1.0, ratio])
    assert kept.passes == passes
    assert ("outside" in list(guidance.render([kept]).columns[-1].cells)) == (not passes)


@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_every_applicable_strategy_is_measured() -> None:
    pipe = flux.family()[0].build()
    pipe.default_sample_size = 8
    found = guidance.measure(pipe, ["fox"], ["red heart", "lion"], steps=6)
    names = [candidate.name for candidate in demo.EVERY if candidate.name not in ("DeepCache", "TextKV")]
    assert [item.method.name for item in found] == names
    assert all(len(item.cosines) == len(item.ratios) == 1 for item in found)
    assert any(item.cosines[0] < 1 for item in found)
