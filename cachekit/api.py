"""The public verbs: enable, disable, look at and free caches of a pipeline or a denoiser."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from cachekit.engine import observers
from cachekit.engine.attach import attach
from cachekit.engine.denoiser import DenoiserEngine
from cachekit.engine.discovery import find_denoisers, takes_timestep, unwrap
from cachekit.engine.member import Member
from cachekit.engine.ranks import check_group
from cachekit.engine.rules import Rule
from cachekit.engine.session import known_session
from cachekit.engine.sites import Site
from cachekit.engine.stats import Stats
from cachekit.errors import CacheConflictError, UnsupportedModelError
from cachekit.strategies import CacheConfig, conflict, find_strategy, strategy_named, to_config

__all__ = ["Handle", "cache_context", "cached", "disable_cache", "enable_cache", "free", "is_cache_enabled", "stats"]

_lock = threading.RLock()
_engines: weakref.WeakKeyDictionary[nn.Module, DenoiserEngine] = weakref.WeakKeyDictionary()

Configs = CacheConfig | str | Sequence[Any] | Any


class Handle:
    """Enabled caches. As a context manager it disables them at the end of the block."""

    def __init__(self, enabled: Sequence[tuple[DenoiserEngine, Member]], configs: dict[str, CacheConfig]) -> None:
        self._enabled = list(enabled)
        self._configs = configs

    @property
    def config(self) -> CacheConfig:
        """The config in force; of several the first."""
        return next(iter(self._configs.values()))

    @property
    def configs(self) -> dict[str, CacheConfig]:
        """Strategy name -> config in force."""
        return dict(self._configs)

    @property
    def report(self) -> str:
        """What was hooked on which denoiser."""
        return "\n".join(
            f"{engine.name or 'denoiser'}: {member.label} on {member.describe()}" for engine, member in self._enabled
        )

    def __repr__(self) -> str:
        return f"<Handle: {self.report}>"

    def update(self, strategy: str | None = None, **fields: Any) -> None:
        """Change fields of a config while enabled; what is held is let go, hooks stay.

        Args:
            strategy: name of the strategy to change; may be left out when there is only one.
            **fields: new values.

        Raises:
            RuntimeError: the cache has been disabled.
            ValueError: for an unknown field, a bad value, a strategy that is not enabled here or not named among
                several, or a change that would need another site.
        """
        with _lock:
            if not any(member in engine.members for engine, member in self._enabled):
                raise RuntimeError("this cache has been disabled; call enable_cache again")
            if strategy is None and len(self._configs) > 1:
                raise ValueError(f"say which strategy to change: update({next(iter(self._configs))!r}, ...)")
            name = strategy or next(iter(self._configs))
            if name not in self._configs:
                raise ValueError(f"{name!r} is not enabled by this handle; it has {', '.join(self._configs)}")
            config = self._configs[name].replaced(**fields)
            mine = [(engine, member) for engine, member in self._enabled if member.strategy == name]
            rules = [find_strategy(config).build(config, _alive(engine)) for engine, _ in mine]
            for (_, member), new in zip(mine, rules, strict=True):
                if [part.rule.site for part in member.parts] != [rule.site for rule in new]:
                    raise ValueError("this change needs other hooks; call disable() and enable_cache again")
            for (engine, member), new in zip(mine, rules, strict=True):
                engine.update(member, new, str(config))
            self._configs[name] = config

    def stats(self) -> Stats:
        """Statistics of the strategies of this handle."""
        members = {(engine.name, member.strategy) for engine, member in self._enabled}
        engines = dict.fromkeys(engine for engine, _ in self._enabled)
        return Stats(item for engine in engines for item in engine.stats() if (item.name, item.strategy) in members)

    def disable(self) -> None:
        """Take the caches off; doing it twice is fine."""
        with _lock:
            for engine, member in self._enabled:
                _take_out(engine, member)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()


def enable_cache(
    target: Any,
    config: Configs,
    strict: bool = False,
    *,
    progress: bool = True,
    branches: Sequence[str] | None = None,
    group: Any = None,
    **overrides: Any,
) -> Handle:
    """Cache every denoiser of a pipeline, or one denoiser.

    Args:
        target: a `DiffusionPipeline`, a `ModularPipeline` or a denoiser module.
        config: a config, a strategy name such as "first_block", diffusers' own config object, or a list of these
            (in any order). Calling again with another strategy adds it.
        strict: raise at the first call that turns out to have nothing to skip, instead of warning.
        progress: show "reused n/m" in the pipeline's progress bar.
        branches: names of the guidance branches in the order of their calls within a step; found out if left out.
        group: process group or device mesh of the ranks that share every denoiser call, which then decide together.
            Found out with diffusers' `enable_parallelism` and for `DTensor` weights; to be told where tokens or weights
            are split otherwise. Not for ranks that have prompts of their own.
        **overrides: fields of the config to set otherwise.

    Returns:
        A handle to look at, update and disable the caches.

    Raises:
        UnsupportedModelError: nothing can be skipped in a denoiser, or the target has no denoiser.
        CacheConflictError: this strategy, one that it does not go with, diffusers' own cache or cache-dit's is
            enabled already.
        ProfileMismatchError: a config from a profile that was made for another pipeline.
        ValueError, TypeError: a bad config. In every case nothing is changed.
    """
    chosen = _chosen(config, overrides)
    if group is not None:
        check_group(group)
    with _lock:
        denoisers = find_denoisers(target)
        if not denoisers:
            raise UnsupportedModelError(
                f"{type(target).__name__} has no denoiser (a component that takes a timestep); pass the module itself"
            )
        for name, module in denoisers.items():
            _refuse_others(module)
            _refuse_conflicts(target, name, module, chosen)
        for item in chosen:
            check = find_strategy(item).check
            if check is not None:
                check(item, target)
        members: list[tuple[str, nn.Module, Member]] = []
        enabled: list[tuple[DenoiserEngine, Member]] = []
        try:
            for name, module in denoisers.items():
                members += [(name, module, member) for member in _members(name, module, chosen, strict)]
            for name, module, member in members:
                engine = _find(module) or _new_engine(name, module, progress)
                enabled.append((engine, member))
                engine.add(member)
                if branches:
                    engine.name_branches(branches)
                if not isinstance(target, nn.Module):
                    engine.follow(target)
        except BaseException:
            for engine, member in enabled:
                _take_out(engine, member)
            for _, _, member in members:
                member.remove()
            raise
        for engine, _ in enabled if group is not None else ():
            engine.ranks.tell(group)
        handle = Handle(enabled, {find_strategy(item).name: item for item in chosen})
        for _, member in enabled:
            member.roll_back = handle.disable
        return handle


def disable_cache(target: Any, strategy: str | None = None) -> None:
    """Take the caches off a pipeline or a denoiser; output is bit-identical to uncached again. No cache is no error.

    A denoiser that the pipeline ran with but no longer has is freed of its cache too.

    Args:
        target: what :func:`enable_cache` was called with.
        strategy: name of the one strategy to take off; None for all.

    Raises:
        ValueError: for a name that no strategy has.
    """
    if strategy is not None:
        strategy_named(strategy)
    with _lock:
        for engine in _engines_of(target):
            for member in engine.members:
                if strategy in (None, member.strategy):
                    _take_out(engine, member)


@contextmanager
def cached(target: Any, config: Configs, strict: bool = False, **options: Any) -> Iterator[Handle]:
    """`with cached(pipe, config):` caches inside the block only. Options as for :func:`enable_cache`."""
    handle = enable_cache(target, config, strict, **options)
    try:
        yield handle
    finally:
        handle.disable()


def is_cache_enabled(target: Any) -> bool:
    """True when a denoiser of `target` is cached by cachekit."""
    return any(_find(module) is not None for module in find_denoisers(target).values())


def stats(target: Any) -> Stats:
    """Statistics of the last run of each cached denoiser of `target`; empty when no cache is enabled."""
    return Stats(item for engine in _engines_of(target) for item in engine.stats())


@contextmanager
def cache_context(model: Any, name: str) -> Iterator[None]:
    """`with cache_context(model, "cond"):` says which guidance branch the calls of a denoiser inside belong to.

    Needed only where branches cannot be told by what the denoiser is given; works on any module, cached or not.

    Args:
        model: the denoiser, wrapped by `torch.compile` or not.
        name: "cond", "uncond" or any other name; a second call with it in one step is another branch, "cond#2".

    Raises:
        TypeError: `model` is not a module or `name` is not a string.
    """
    if not isinstance(model, nn.Module) or not isinstance(name, str):
        raise TypeError(f"cache_context takes a module and a name, got {type(model).__name__} and {name!r}")
    with observers.naming(unwrap(model), name):
        yield


def free(target: Any) -> None:
    """Let go of everything the caches of `target` hold; the caches stay enabled."""
    for engine in _engines_of(target):
        engine.free()


def _find(module: nn.Module) -> DenoiserEngine | None:
    """The engine on a module, also when the module has been wrapped by `torch.compile` since."""
    engine = _engines.get(module) or _engines.get(unwrap(module))
    return None if engine is None or engine.removed else engine


def _engines_of(target: Any) -> list[DenoiserEngine]:
    """Engines on the denoisers of a target, and on those that its pipeline ran with but no longer has."""
    found = [_find(module) for module in find_denoisers(target).values()]
    session = None if isinstance(target, nn.Module) else known_session(target)
    gone = [] if session is None else [engine for engine in session.engines if engine not in found]
    return [engine for engine in (*found, *gone) if engine is not None]


def _take_out(engine: DenoiserEngine, member: Member) -> None:
    engine.take_out(member)
    module = engine.hooked
    if engine.removed and module is not None and _engines.get(module) is engine:
        del _engines[module]


def _alive(engine: DenoiserEngine) -> nn.Module:
    module = engine.hooked
    if module is None:
        raise RuntimeError("the denoiser of this handle no longer exists; enable the cache on the new one")
    return module


def _chosen(config: Configs, overrides: dict[str, Any]) -> list[CacheConfig]:
    """The configs of one call, lossless ones last so that the order given never matters."""
    given = list(config) if isinstance(config, (list, tuple)) else [config]
    if not given:
        raise ValueError("an empty list enables nothing; pass at least one config")
    if len(given) > 1 and overrides:
        raise ValueError(f"with several configs set {', '.join(overrides)} in the config that it belongs to")
    chosen = sorted((to_config(item, overrides) for item in given), key=lambda item: find_strategy(item).lossless)
    names = [find_strategy(item).name for item in chosen]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise ValueError(f"{twice[0]} stands twice in the list; keep one config of it")
    return chosen


def _new_engine(name: str, module: nn.Module, progress: bool) -> DenoiserEngine:
    engine = _engines[module] = DenoiserEngine(name, module, progress)
    return engine


def _members(name: str, module: nn.Module, chosen: Sequence[CacheConfig], strict: bool) -> list[Member]:
    """The strategies for one denoiser, hooked; all or none."""
    engine = _find(module)
    known = [] if engine is None else [(m.strategy, [part.rule for part in m.parts]) for m in engine.members]
    members: list[Member] = []
    try:
        for config in chosen:
            rules = find_strategy(config).build(config, module)
            _refuse_pairs(find_strategy(config).name, rules, known)
            known.append((find_strategy(config).name, rules))
            members.append(_member(name, module, config, rules, strict))
    except BaseException:
        for member in members:
            member.remove()
        raise
    return members


def _member(name: str, module: nn.Module, config: CacheConfig, rules: Sequence[Rule], strict: bool) -> Member:
    sites: list[Site] = []
    try:
        for rule in rules:
            sites.append(attach(rule.site, module))
    except BaseException:
        for site in sites:
            site.remove()
        raise
    chosen = find_strategy(config)
    owner = f"`{name or type(unwrap(module)).__name__}`"
    pairs = list(zip(rules, sites, strict=True))
    return Member(chosen.name, str(config), owner, pairs, chosen.lossless, strict)


def _refuse_pairs(name: str, rules: Sequence[Rule], known: Sequence[tuple[str, list[Rule]]]) -> None:
    for other, other_rules in known:
        reason = conflict(strategy_named(name), rules, strategy_named(other), other_rules)
        if reason is not None:
            raise CacheConflictError(
                f"{reason}; keep one of them (cachekit.disable_cache(target, {other!r}) takes one off)"
            )


def _refuse_others(module: nn.Module) -> None:
    core = unwrap(module)
    if not takes_timestep(core):
        raise UnsupportedModelError(
            f"{type(core).__name__}.forward has no argument for the timestep, so it is no denoiser or its steps cannot "
            f"be told; a denoiser of your own needs a parameter called timestep, t or sigma"
        )


def _refuse_conflicts(target: Any, name: str, module: nn.Module, chosen: Sequence[CacheConfig]) -> None:
    owner = f"pipe.{name}" if name else "model"
    core = unwrap(module)
    engine = _find(module)
    for member in () if engine is None else engine.members:
        if any(find_strategy(item).name == member.strategy for item in chosen):
            raise CacheConflictError(
                f"{owner} is cached already by {member.strategy}: change the settings with handle.update(...), or call "
                f"cachekit.disable_cache(...) first"
            )
    if getattr(core, "_cache_config", None) is not None:
        raise CacheConflictError(f"diffusers' own cache is enabled; call {owner}.disable_cache() first")
    for item in (target, core):
        if getattr(item, "_is_cached", False) or hasattr(item, "_context_manager"):
            raise CacheConflictError("cache-dit is enabled on this pipeline; call cache_dit.disable_cache(pipe) first")
