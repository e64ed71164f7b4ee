"""Calibration of real pipelines with random weights."""

from __future__ import annotations

from typing import Any

import pytest

import cachekit as ck
from cachekit.calibration.runs import Batch
from cachekit.calibration.search import spread

from ..pipelines.runs import arguments
from ..pipelines.tiny import TINY, TinyPipeline

pytestmark = pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")


def test_two_experts_with_one_profile() -> None:
    """Wan 2.2: each expert computes its first step; nothing is predicted across the change."""
    tiny = TINY["wan-two-experts"]
    pipe, options = tiny.build(), _options(tiny)
    profile = ck.calibrate(
        pipe, ["a cat", "a dog"], 8, budgets=[4], held_back=0, evaluations=1, progress=False, **options
    )
    assert profile.starts[0] == 0
    assert len(profile.starts) == 2
    change = profile.starts[1]
    assert set(profile.drifts) == set(profile.magnitudes) == {"cond", "uncond"}
    assert all(len(curve) == 8 and curve[2] > 0 for curve in profile.drifts.values())
    point = profile.front[0]
    assert change in point.computed_steps
    assert len(point.computed_steps) == 4
    for step, (used, weights) in point.rows.items():
        assert sum(weights) == pytest.approx(1)
        assert all((source >= change) == (step >= change) for source in used)
    with ck.cached(pipe, ck.ScheduleCacheConfig.from_profile(profile, computed_steps=4)) as handle:
        tiny.call(pipe, steps=8)
        stats = handle.stats()
    high, low = (stats.denoisers[part].last for part in tiny.denoisers)
    for branch in ("cond", "uncond"):
        assert (*high.computed_steps(branch), *low.computed_steps(branch)) == point.computed_steps
    with pytest.raises(ValueError, match=r"from 2 to 8 \(each expert"):
        ck.calibrate(pipe, ["a cat"], 8, budgets=[1], held_back=0, progress=False, **options)


@pytest.mark.parametrize("fixed", [(0,), (0, 5), (0, 1, 2), (0, 7)])
def test_spread_keeps_what_is_fixed(fixed: tuple[int, ...]) -> None:
    for computed in range(len(fixed), 9):
        schedule = spread(8, computed, fixed)
        assert len(schedule) == computed
        assert set(fixed) <= set(schedule)
        assert list(schedule) == sorted(schedule)


def test_unipc_of_a_video_pipeline() -> None:
    """A multistep solver in a real pipeline: what is kept is never worse on the final latents than plain weights."""
    tiny = TINY["wan"]
    options = {**_options(tiny), "negative_prompt": "blurry"}
    pipe = tiny.build()
    profile = ck.calibrate(pipe, ["a cat"], 8, budgets=[3, 4], held_back=0, evaluations=1, progress=False, **options)
    assert profile.identity.scheduler == "UniPCMultistepScheduler"
    assert profile.is_affine
    batch = Batch(pipe, ["a cat"], 8, 0, options, 3)
    batch.run_uncached()
    for point in profile.front:
        for order in (0, 1):
            plain = batch.errors(point.computed_steps, fitted=False, order=order)
            assert point.error <= float(10 * plain.log10().mean()) + 1e-6


def _options(tiny: TinyPipeline) -> dict[str, Any]:
    """What else the pipeline is called with, beside what calibration sets itself."""
    own = ("generator", "return_dict", "output_type", "negative_prompt")
    return {name: value for name, value in arguments(tiny).items() if name not in own}
