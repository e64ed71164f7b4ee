"""Runs of the tiny pipelines under each strategy, made once and shared by the end-to-end tests."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

import cachekit as ck

from .tiny import TINY, TinyPipeline

STEPS = 8
TWO_CALLS = [name for name, tiny in TINY.items() if tiny.two_call_guidance]
CONTROLLED = ("flux-controlnet", "sd15-controlnet")
HEAVY = (*CONTROLLED, "hunyuan-video", "lumina2")
STRATEGIES = ("first_block", "magcache", "taylorseer", "taylorseer-attention")
ENTRIES = {"flux-img2img": 6, "sd15": STEPS + 1, "sd15-controlnet": STEPS + 1}
"""Executed entries of the schedule where they are not `STEPS`: strength 0.75, and PNDM's additional call."""
TWO_STEPS = ("flux2", "wan-two-experts")
"""Pipelines whose magnitude ratios are made by `MagCacheConfig(calibrate=True)`, the others by the function."""
READS = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__")
Curve = Sequence[float] | Mapping[str, Sequence[float]]


class AbortError(Exception):
    """Ends a run from its callback."""


def names(*chosen: str) -> list[Any]:
    """Pipelines as test parameters, the heaviest marked slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] if name in HEAVY else []) for name in chosen or TINY]


def entries(name: str) -> int:
    """Entries of the schedule that a run of `STEPS` steps executes."""
    return ENTRIES.get(name, STEPS)


def branches(name: str, guidance: bool) -> int:
    """Denoiser calls per entry."""
    return 2 if guidance and TINY[name].two_call_guidance else 1


@cache
def built(name: str) -> DiffusionPipeline:
    return TINY[name].build()


@cache
def uncached(name: str, guidance: bool) -> Tensor:
    assert not ck.is_cache_enabled(built(name))
    return TINY[name].call(built(name), steps=STEPS, guidance=guidance)


class _Listener:
    """Stands in for a pipeline and keeps what it is called with."""

    kwargs: dict[str, Any]

    def __call__(self, **kwargs: Any) -> tuple[Tensor]:
        self.kwargs = kwargs
        return (torch.zeros(1),)


def arguments(tiny: TinyPipeline, **options: Any) -> dict[str, Any]:
    """What `tiny.call` passes on to the pipeline, without the prompt and the number of steps."""
    listener = _Listener()
    tiny.call(listener, **options)  # type: ignore[arg-type]
    return {key: value for key, value in listener.kwargs.items() if key not in ("prompt", "num_inference_steps")}


@cache
def ratios(name: str) -> Mapping[str, Sequence[float]]:
    """Magnitude ratios of one guided run, by the two-step flow or by the function."""
    tiny, pipe = TINY[name], built(name)
    if name not in TWO_STEPS:
        return ck.calibrate_magnitudes(pipe, "a cat", STEPS, **arguments(tiny)).ratios
    with ck.cached(pipe, ck.MagCacheConfig(calibrate=True, num_inference_steps=STEPS)) as handle:
        tiny.call(pipe, steps=STEPS)
        return handle.stats().magnitude_ratios


def never(name: str, strategy: str, mag_ratios: Curve | None = None) -> ck.CacheConfig:
    """Settings under which nothing may be skipped; the magnitude ratios are measured unless given."""
    return _settings(name, strategy, mag_ratios, threshold=0.0, interval=1)


def always(name: str, strategy: str, mag_ratios: Curve | None = None) -> ck.CacheConfig:
    """Settings under which all is skipped that the strategy can skip; the ratios as for `never`."""
    return _settings(name, strategy, mag_ratios, threshold=1e9, interval=3)


def _settings(name: str, strategy: str, mag_ratios: Curve | None, threshold: float, interval: int) -> ck.CacheConfig:
    if strategy == "first_block":
        return ck.FirstBlockCacheConfig(threshold)
    if strategy == "magcache":
        return ck.MagCacheConfig(threshold=threshold, mag_ratios=mag_ratios or ratios(name))
    lite = {"taylorseer": True, "taylorseer-attention": False}[strategy]
    return ck.TaylorSeerCacheConfig(interval, use_lite_mode=lite)


@contextmanager
def counted(name: str) -> Iterator[Counter[str]]:
    """Counts the calls of each denoiser, from outside of cachekit."""
    counts: Counter[str] = Counter()
    handles = [
        getattr(built(name), part).register_forward_pre_hook(lambda *_, part=part: counts.update([part]))
        for part in TINY[name].denoisers
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def read_backs() -> Iterator[list[str]]:
    """Places in cachekit's own code that read a value back from the device, as they happen."""
    seen: list[str] = []

    def watched(owner: Any, name: str) -> Any:
        function = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            module = str(sys._getframe(1).f_globals.get("__name__"))
            if module.startswith("cachekit"):
                seen.append(f"{module}: {name}")
            return function(*args, **kwargs)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, watched(torch.Tensor, name))
        for name in ("equal", "allclose"):
            patch.setattr(torch, name, watched(torch, name))
        yield seen


@dataclass(frozen=True)
class Record:
    """One cached run; with guidance an equal one after it, whose reads are in `reads`."""

    output: Tensor
    stats: ck.Stats
    calls: Counter[str]
    again: Tensor | None = None
    stats_again: ck.Stats | None = None
    reads: Sequence[str] = ()


@cache
def record(name: str, strategy: str, guidance: bool) -> Record:
    """A run that skips always."""
    tiny, pipe = TINY[name], built(name)
    with ck.cached(pipe, always(name, strategy)) as handle:
        with counted(name) as calls:
            output = tiny.call(pipe, steps=STEPS, guidance=guidance)
        stats = handle.stats()
        if not guidance:
            return Record(output, stats, calls)
        with read_backs() as reads:
            again = tiny.call(pipe, steps=STEPS, guidance=guidance)
        return Record(output, stats, calls, again, handle.stats(), reads)
