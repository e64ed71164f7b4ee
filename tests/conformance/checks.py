"""What every strategy must do on every denoiser. Used by the tests and by the table in the docs."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import cachekit as ck
from cachekit.api import _engines
from cachekit.engine.layout import Layout

from .cases import Case, run

STEPS = 10


@dataclass(frozen=True)
class Settings:
    """One strategy: a config that never skips, one that skips whenever it may, and one for frozen inputs."""

    name: str
    never: ck.CacheConfig
    always: ck.CacheConfig


STRATEGIES = {
    settings.name: settings
    for settings in (
        Settings("first_block", ck.FirstBlockCacheConfig(0.0), ck.FirstBlockCacheConfig(1e9)),
        Settings(
            "magcache",
            ck.MagCacheConfig(mag_ratios=[1.01] * STEPS, threshold=0.0, num_inference_steps=STEPS),
            ck.MagCacheConfig(mag_ratios=[1.01] * STEPS, threshold=10.0, num_inference_steps=STEPS),
        ),
        Settings("seacache", ck.SeaCacheConfig(0.0), ck.SeaCacheConfig(1e9)),
        Settings("taylorseer", ck.TaylorSeerCacheConfig(1), ck.TaylorSeerCacheConfig(3)),
        Settings(
            "taylorseer-attention",
            ck.TaylorSeerCacheConfig(1, use_lite_mode=False),
            ck.TaylorSeerCacheConfig(3, use_lite_mode=False),
        ),
    )
}


@dataclass
class Subject:
    """A case with its model and uncached outputs."""

    case: Case
    model: nn.Module
    base: list[Tensor]

    @classmethod
    def of(cls, case: Case) -> Subject:
        model = case.build()
        return cls(case, model, run(case, model, STEPS))


@contextmanager
def cached(subject: Subject, config: ck.CacheConfig) -> Iterator[ck.Handle]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ck.CacheWarning)
        with ck.cached(subject.model, config) as handle:
            yield handle


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def layout_of(model: nn.Module, branch: str) -> Layout:
    layout = _engines[model].members[0].parts[0].site.layout(branch)  # type: ignore[attr-defined]
    assert layout is not None, "no computed call has taught the layout"
    return layout


@contextmanager
def counted(layouts: Iterable[Layout]) -> Iterator[Counter[int]]:
    """Counts how often each block of the layouts really runs."""
    counts: Counter[int] = Counter()

    def count(module: nn.Module, args: Any) -> None:
        counts[id(module)] += 1

    modules = {id(place.slot.module): place.slot.module for layout in layouts for place in layout.places}
    hooks = [module.register_forward_pre_hook(count) for module in modules.values()]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def nothing_to_skip(subject: Subject, settings: Settings) -> None:
    """Contract 1: a gate that never reuses changes no bit; and the gate saw that something moves."""
    with cached(subject, settings.never) as handle:
        outputs = run(subject.case, subject.model, STEPS)
        stats = handle.stats()
    assert stats.reused == 0
    assert equal(outputs, subject.base), "computing everything changed the output"
    if settings.name in ("first_block", "seacache"):
        scores = [decision.score for decision in stats.last.decisions if decision.score is not None]
        assert max(scores) > 0, "the score never moves, so the gate would skip forever"


def skips_and_repeats(subject: Subject, settings: Settings) -> tuple[int, int]:
    """Contracts 3 and 9: two equal runs are equal, the second without a reset; what is skipped does not run.

    Returns:
        Reused and all calls of a run.
    """
    case, model = subject.case, subject.model
    with cached(subject, settings.always) as handle:
        first = run(case, model, STEPS)
        if settings.name == "taylorseer-attention":
            second = run(case, model, STEPS)
            stats = handle.stats()
        else:
            second, stats = _counting_run(subject, handle)
    assert equal(first, second), "the first run leaked into the second"
    assert stats.reused > 0, f"nothing was reused: {stats}"
    assert not equal(first, subject.base), "reuse changed nothing: the inputs do not move or nothing was skipped"
    assert all(torch.isfinite(output).all() for output in first)
    return stats.reused, stats.calls


def _counting_run(subject: Subject, handle: ck.Handle) -> tuple[list[Tensor], ck.Stats]:
    layouts = {branch: layout_of(subject.model, branch) for branch in handle.stats().last.branches}
    assert all(layout.skippable > 0 for layout in layouts.values())
    with counted(layouts.values()) as counts:
        outputs = run(subject.case, subject.model, STEPS)
    stats = handle.stats()
    expected = 0
    for decision in stats.last.decisions:
        layout = layouts[decision.branch]
        expected += len(layout.places) - (layout.skippable if decision.reused else 0)
    assert sum(counts.values()) == expected, "other blocks ran than the statistics say"
    return outputs, stats


def frozen_inputs_are_exact(subject: Subject, settings: Settings) -> None:
    """Contract 4: where nothing moves, a reuse gives the computed output (to one rounding of input + change)."""
    case, model = subject.case, subject.model
    kwargs = case.at(case.inputs(1), case.timesteps(STEPS)[4], 0.4)
    with torch.no_grad(), cached(subject, settings.always) as handle:
        outputs = [case.output(model(**kwargs)) for _ in range(STEPS)]
        assert handle.stats().reused > 0
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-4, atol=1e-5 * float(outputs[0].abs().max()) + 1e-6)


def restores(subject: Subject) -> None:
    """Contract 2: nothing of ours is left, and the output is bit-identical."""
    for name, module in subject.model.named_modules():
        assert "_compiled_call_impl" not in module.__dict__, f"{name} is still hooked"
    assert not ck.is_cache_enabled(subject.model)
    assert equal(run(subject.case, subject.model, STEPS), subject.base)


def batched_equals_two_calls(subject: Subject, settings: Settings) -> None:
    """Contract 6: with the same decisions one call of both branches gives what two calls give, up to rounding."""
    case, model = subject.case, subject.model
    with cached(subject, settings.always) as handle:
        two = run(case, model, STEPS)
        pattern = handle.stats().last.computed_steps()
        one = run(case, model, STEPS, batched_cfg=True)
        assert handle.stats().last.computed_steps() == pattern
    for step, output in enumerate(one):
        halves = output.chunk(2)
        for branch in range(2):
            expected = two[2 * step + branch]
            scale = float(expected.abs().max())
            torch.testing.assert_close(halves[branch], expected, rtol=2e-3, atol=2e-3 * scale + 1e-5)


def aborted_runs_do_not_leak(subject: Subject, settings: Settings) -> None:
    """Contract 3: an exception inside the model, then another size and batch, then the first run again."""
    case, model = subject.case, subject.model

    def explode(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    with cached(subject, settings.always):
        clean = run(case, model, STEPS)
        last = layout_or_none(model)
        if last is not None:
            bomb = last.places[0].slot.module.register_forward_pre_hook(explode)
            try:
                run(case, model, STEPS)
            except KeyboardInterrupt:
                pass
            else:
                raise AssertionError("the first block did not run in a fresh run")
            finally:
                bomb.remove()
        if case.has_sizes:
            run(case, model, 4, size=1)
        if case.supports_batch:
            run(case, model, 4, batch=2)
        assert equal(run(case, model, STEPS), clean)


def layout_or_none(model: nn.Module) -> Layout | None:
    layout: Callable[[str], Layout | None] | None = getattr(_engines[model].members[0].parts[0].site, "layout", None)
    return None if layout is None else layout("cond")


def copies_are_plain(subject: Subject, settings: Settings) -> None:
    """Contract 2: a copy made while enabled carries nothing of ours and runs uncached."""
    case, model = subject.case, subject.model
    keys = list(model.state_dict())
    with cached(subject, settings.always):
        run(case, model, 4)
        twin = copy.deepcopy(model)
        assert list(model.state_dict()) == keys
    assert not ck.is_cache_enabled(twin)
    assert not any("_compiled_call_impl" in module.__dict__ for module in twin.modules())
    for output, expected in zip(run(case, twin, STEPS), subject.base, strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
