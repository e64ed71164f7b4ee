"""What a cache skips moves no weights, whichever of cache and offloading was enabled first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cachekit as ck
import offload

from ..pipelines.tiny import TINY
from ..toys import ALWAYS, ScriptedConfig, pattern
from .support import BLOCK_BYTES, as_accelerator, moves, weighty_pipeline

STEPS = 8
CONFIGS: dict[str, Any] = {
    "first block": ALWAYS,
    "script": ScriptedConfig(computed=(0, 4)),
    "magcache": ck.MagCacheConfig(threshold=0.5, max_skip_steps=2, retention_ratio=0.1, mag_ratios=[1.0] * STEPS),
    "taylor": ck.TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=1, use_lite_mode=True),
    "schedule": ck.ScheduleCacheConfig(computed_steps=(0, 1, 4)),
}
MODES = ("disk", "group", "sequential")


@pytest.fixture(autouse=True)
def _accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    as_accelerator(monkeypatch)


def enabled(pipe: Any, mode: str, config: Any, cache_first: bool) -> offload.Handle:
    if cache_first:
        ck.enable_cache(pipe, config)
    handle = offload.enable(pipe, mode, "cpu")
    if not cache_first:
        ck.enable_cache(pipe, config)
    return handle


@pytest.mark.parametrize("cache_first", [True, False], ids=["cache first", "offload first"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGS)
def test_skipped_blocks_move_nothing(name: str, mode: str, cache_first: bool) -> None:
    plain = weighty_pipeline()
    ck.enable_cache(plain, CONFIGS[name])
    base = plain(steps=STEPS)
    skips = pattern(plain)
    assert "." in skips, "the test needs skipped steps"

    pipe = weighty_pipeline()
    enabled(pipe, mode, CONFIGS[name], cache_first)
    assert torch.equal(pipe(steps=STEPS), base)
    assert pattern(pipe) == skips
    run = ck.stats(pipe).last
    assert run is not None
    moved = list(run.bytes_moved_per_step.values())
    skipped = [nbytes for nbytes, sign in zip(moved, skips, strict=True) if sign == "."]
    computed = skips.count("#")
    if name != "first block":
        assert skipped == [0] * len(skipped)
        assert sum(moved) <= 4 * computed * BLOCK_BYTES
    elif mode == "sequential":
        assert skipped == [BLOCK_BYTES] * len(skipped), "the probe runs"
        assert sum(moved) == BLOCK_BYTES * (4 * computed + len(skipped))
    else:
        assert skipped == [BLOCK_BYTES] + [0] * (len(skipped) - 1), "the probe is fetched once and stays"


@pytest.mark.parametrize("mode", ["disk", "group"])
def test_only_the_probe_runs_between_computed_steps(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = weighty_pipeline()
    enabled(pipe, mode, ALWAYS, cache_first=False)
    with moves(monkeypatch) as seen:
        pipe(steps=STEPS)
    assert pattern(pipe) == "#......."
    assert seen == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "blocks.0"]


@pytest.mark.parametrize("cache_first", [True, False])
def test_a_schedule_is_known_across_steps(cache_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block of the next computed step is fetched ahead; after the last computed step nothing is."""
    pipe = weighty_pipeline()
    enabled(pipe, "disk", CONFIGS["schedule"], cache_first)
    blocks = [f"blocks.{index}" for index in range(4)]
    with moves(monkeypatch) as seen:
        pipe(steps=STEPS)
        assert pattern(pipe) == "##..#..."
        assert seen == 3 * blocks
    run = ck.stats(pipe).last
    assert run is not None
    assert list(run.bytes_moved_per_step.values()) == [nbytes * BLOCK_BYTES for nbytes in (5, 4, 0, 0, 3, 0, 0, 0)], (
        "block 0 of steps 1 and 4 is on its way before the step before them ends"
    )


def test_an_open_decision_fetches_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the probe runs nobody knows whether the others will."""
    pipe = weighty_pipeline()
    offload.enable(pipe, "disk", "cpu")
    ck.enable_cache(pipe, ck.FirstBlockCacheConfig(threshold=1e-9))
    pending: list[list[str]] = []
    block = pipe.transformer.blocks[0]
    with moves(monkeypatch) as seen:
        block.register_forward_hook(lambda *_: pending.append(list(seen)))
        pipe(steps=3)
    assert pattern(pipe) == "###"
    assert pending[1][-1] == "blocks.3" or pending[1][-1] == "blocks.0"
    assert "blocks.1" not in pending[1][4:]


def test_of_a_unet_the_shallow_part_alone_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = TINY["sd15"]
    plain = tiny.build()
    ck.enable_cache(plain, ck.DeepCacheConfig(cache_interval=3))
    base = tiny.call(plain, steps=6)
    pipe = tiny.build()
    offload.enable(pipe, "disk", "cpu", components=["unet"])
    ck.enable_cache(pipe, ck.DeepCacheConfig(cache_interval=3))
    with moves(monkeypatch) as seen:
        assert torch.equal(tiny.call(pipe, steps=6), base)
    skips = pattern(pipe, "cond") if "cond" in ck.stats(pipe).last.branches else pattern(pipe)
    computed = skips.count("#")
    assert "." in skips
    inner = [name for name in set(seen) if name not in ("down_blocks.0", "up_blocks.3")]
    assert inner
    assert all(seen.count(name) <= computed for name in inner)


def test_caches_show_what_moved() -> None:
    pipe = weighty_pipeline()
    ck.enable_cache(pipe, CONFIGS["schedule"])
    pipe(steps=STEPS)
    assert ck.stats(pipe).bytes_moved == 0
    handle = offload.enable(pipe, "disk", "cpu")
    pipe(steps=STEPS)
    assert ck.stats(pipe).bytes_moved == handle.stats().moved_bytes == 12 * BLOCK_BYTES
    assert "of weights moved; none in 5 steps" in str(ck.stats(pipe))
