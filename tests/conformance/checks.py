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
from cachekit.engine.attention import attention_kinds
from cachekit.engine.layout import Layout
from cachekit.engine.rules import GuidanceSpec, ModulesSpec

from .cases import Case, run

STEPS = 10
NOTHING_CONSTANT = "nothing constant here"
"""What the statistics say where an exact strategy finds nothing that it could keep."""
Config = ck.CacheConfig | Callable[[nn.Module], ck.CacheConfig]


@dataclass(frozen=True)
class Settings:
    """One strategy: a config that never skips and one that skips whenever it may, or how to make them for a model.

    Both are the same where a reuse changes no bit.
    `predicts_branch`: it predicts a guidance branch, so it must know when a doubled batch is a guidance pair.
    """

    name: str
    never: Config
    always: Config
    lossless: bool = False
    predicts_branch: bool = False


def broadcasting(interval: int) -> Callable[[nn.Module], ck.CacheConfig]:
    """Pyramid Attention Broadcast of every type of attention that a model has, at every noise level."""

    def config(model: nn.Module) -> ck.CacheConfig:
        fields: dict[str, Any] = {}
        for kind in attention_kinds(model):
            fields[f"{kind}_attention_block_skip_range"] = interval
            fields[f"{kind}_attention_timestep_skip_range"] = (-1, 1001)
        return ck.PyramidAttentionBroadcastConfig(**fields)

    return config


def faster(attention: int, guidance: int) -> Callable[[nn.Module], ck.CacheConfig]:
    """FasterCache of guidance and of every type of attention that a model has, at every noise level."""

    def config(model: nn.Module) -> ck.CacheConfig:
        fields: dict[str, Any] = {}
        for kind in attention_kinds(model).keys() & {"spatial", "temporal"}:
            fields[f"{kind}_attention_block_skip_range"] = attention
            fields[f"{kind}_attention_timestep_skip_range"] = (-1, 1001)
        return ck.FasterCacheConfig(
            **fields,
            unconditional_batch_skip_range=guidance,
            unconditional_batch_timestep_skip_range=(-1, 1001),
        )

    return config


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
        Settings("schedule", ck.ScheduleCacheConfig(range(4 * STEPS)), ck.ScheduleCacheConfig(range(0, STEPS, 3))),
        Settings("text_kv", ck.TextKVCacheConfig(), ck.TextKVCacheConfig(), lossless=True),
        Settings("pab", broadcasting(1), broadcasting(3)),
        Settings("deepcache", ck.DeepCacheConfig(1), ck.DeepCacheConfig(3)),
        Settings("fastercache", faster(1, 1), faster(2, 4), predicts_branch=True),
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


def config_for(config: Config, model: nn.Module) -> ck.CacheConfig:
    """A config, made for the model where it depends on it."""
    return config if isinstance(config, ck.CacheConfig) else config(model)


@contextmanager
def cached(subject: Subject, config: Config, branches: tuple[str, ...] | None = None) -> Iterator[ck.Handle]:
    config = config_for(config, subject.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ck.CacheWarning)
        with ck.cached(subject.model, config, branches=branches) as handle:
            yield handle


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def modules_of(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Rule -> the single modules that it predicts, the model itself for a branch; nothing for block stacks."""
    sites = {part.rule.name: part.rule.site for part in _engines[model].members[0].parts}
    paths = {name: ("",) if isinstance(site, GuidanceSpec) else site for name, site in sites.items()}
    paths = {name: site.modules if isinstance(site, ModulesSpec) else site for name, site in paths.items()}
    return {
        name: [model.get_submodule(path) for path in found] for name, found in paths.items() if isinstance(found, tuple)
    }


def has_layout(model: nn.Module) -> bool:
    """True where a block stack is skipped; other sites learn no layout."""
    return hasattr(_engines[model].members[0].parts[0].site, "layout")


def layout_of(model: nn.Module, branch: str) -> Layout:
    layout = _engines[model].members[0].parts[0].site.layout(branch)  # type: ignore[attr-defined]
    assert layout is not None, "no computed call has taught the layout"
    return layout


@contextmanager
def counted(modules: Iterable[nn.Module]) -> Iterator[Counter[int]]:
    """Counts how often each module really runs."""
    counts: Counter[int] = Counter()

    def count(module: nn.Module, args: Any) -> None:
        counts[id(module)] += 1

    hooks = [module.register_forward_pre_hook(count) for module in {id(item): item for item in modules}.values()]
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
    assert stats.reused == 0 or settings.lossless
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
        if modules_of(model):
            second, stats = _counting_modules_run(subject, handle)
        elif not has_layout(model):
            second = run(case, model, STEPS)
            stats = handle.stats()
        else:
            second, stats = _counting_run(subject, handle)
    assert equal(first, second), "the first run leaked into the second"
    assert stats.reused > 0 or (settings.lossless and _says_so(stats)), f"nothing was reused: {stats}"
    if settings.lossless:
        assert equal(first, subject.base), "an exact reuse changed the output"
        assert stats.last.projections_reused > 0 or not stats.reused
    else:
        assert not equal(first, subject.base), "reuse changed nothing: the inputs do not move or nothing was skipped"
    assert all(torch.isfinite(output).all() for output in first)
    return stats.reused, stats.calls


def _says_so(stats: ck.Stats) -> bool:
    """True where the statistics say that the model has nothing of what an exact strategy looks for."""
    return any(NOTHING_CONSTANT in note for note in stats.last.notes)


def _counting_run(subject: Subject, handle: ck.Handle) -> tuple[list[Tensor], ck.Stats]:
    layouts = {branch: layout_of(subject.model, branch) for branch in handle.stats().last.branches}
    assert all(layout.skippable > 0 for layout in layouts.values())
    with counted(place.slot.module for layout in layouts.values() for place in layout.places) as counts:
        outputs = run(subject.case, subject.model, STEPS)
    stats = handle.stats()
    expected = 0
    for decision in stats.last.decisions:
        layout = layouts[decision.branch]
        expected += len(layout.places) - (layout.skippable if decision.reused else 0)
    assert sum(counts.values()) == expected, "other blocks ran than the statistics say"
    return outputs, stats


def _counting_modules_run(subject: Subject, handle: ck.Handle) -> tuple[list[Tensor], ck.Stats]:
    case, model, groups = subject.case, subject.model, modules_of(subject.model)
    plain = copy.deepcopy(model)
    paths = {id(module): path for path, module in model.named_modules()}
    each = {name: [plain.get_submodule(paths[id(module)]) for module in group] for name, group in groups.items()}
    with counted(module for group in each.values() for module in group) as whole:
        run(case, plain, STEPS)
    with counted(module for group in each.values() for module in group) as first:
        run(case, plain, STEPS, branches=1)
    with counted(module for group in groups.values() for module in group) as counts:
        outputs = run(case, model, STEPS)
    stats = handle.stats()
    for name, group in groups.items():
        computed = Counter(item.branch for item in stats.last.decisions if item.part == name and not item.reused)
        for module, twin in zip(group, each[name], strict=True):
            calls = first[id(twin)], whole[id(twin)] - first[id(twin)]  # of each branch: some modules run in one only
            if len(stats.last.branches) == 1:
                calls = (sum(calls) // 2,)
            expected = sum(n * computed[branch] for n, branch in zip(calls, stats.last.branches, strict=True))
            assert counts[id(module)] * STEPS == expected, f"{paths[id(module)]} ran too often"
    return outputs, stats


def frozen_inputs_are_exact(subject: Subject, settings: Settings) -> None:
    """Contract 4: where nothing moves, a reuse gives the computed output (to one rounding of input + change)."""
    case, model = subject.case, subject.model
    kwargs = case.at(case.inputs(1), case.timesteps(STEPS)[4], 0.4)
    with torch.no_grad(), cached(subject, settings.always) as handle:
        if settings.lossless:
            run(case, model, 4)  # what is constant is not known before something has moved
        outputs = [case.output(model(**kwargs)) for _ in range(STEPS)]
        assert handle.stats().reused > 0 or _says_so(handle.stats())
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
    with cached(subject, settings.always, ("cond", "uncond") if settings.predicts_branch else None) as handle:
        two = run(case, model, STEPS)
        pattern = inside(handle.stats())
        one = run(case, model, STEPS, batched_cfg=True)
        assert inside(handle.stats()) == pattern
    for step, output in enumerate(one):
        halves = output.chunk(2)
        for branch in range(2):
            expected = two[2 * step + branch]
            scale = float(expected.abs().max())
            torch.testing.assert_close(halves[branch], expected, rtol=2e-3, atol=2e-3 * scale + 1e-5)


def inside(stats: ck.Stats) -> list[tuple[int, str, bool]]:
    """What was decided in the first branch, leaving aside whether the other branch was predicted."""
    run = stats.last
    assert run is not None
    found = run.of(run.branches[0])
    return [(item.step, item.part, item.reused) for item in found if item.part != "guidance"]


def aborted_runs_do_not_leak(subject: Subject, settings: Settings) -> None:
    """Contract 3: an exception inside the model, then another size and batch, then the first run again."""
    case, model = subject.case, subject.model

    def explode(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    with cached(subject, settings.always):
        clean = run(case, model, STEPS)
        bombs = [module.register_forward_pre_hook(explode) for module in _first_modules(model)]
        try:
            run(case, model, STEPS)
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("what is skipped did not run in a fresh run")
        finally:
            for bomb in bombs:
                bomb.remove()
        if case.has_sizes:
            run(case, model, 4, size=1)
        if case.supports_batch:
            run(case, model, 4, batch=2)
        assert equal(run(case, model, STEPS), clean)


def _first_modules(model: nn.Module) -> list[nn.Module]:
    """The first block, or all modules that are predicted: one of them runs first."""
    groups = modules_of(model)
    if groups:
        return [module for group in groups.values() for module in group]
    if not has_layout(model):
        return [model]
    return [layout_of(model, "cond").places[0].slot.module]


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
