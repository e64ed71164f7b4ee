"""The public verbs: enable, disable, look at and free caches of a pipeline or a denoiser."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from cachekit.engine.denoiser import DenoiserEngine
from cachekit.engine.discovery import find_block_lists, find_denoisers, find_unet, latent_names, unwrap
from cachekit.engine.modules_site import ModulesSite
from cachekit.engine.rules import ModulesSpec, Rule
from cachekit.engine.session import known_session
from cachekit.engine.sites import Site
from cachekit.engine.stack import StackSite
from cachekit.engine.stats import Stats
from cachekit.errors import CacheConflictError, UnsupportedModelError
from cachekit.strategies import CacheConfig, find_strategy, to_config

__all__ = ["Handle", "cached", "disable_cache", "enable_cache", "free", "is_cache_enabled", "stats"]

_lock = threading.RLock()
_engines: weakref.WeakKeyDictionary[nn.Module, DenoiserEngine] = weakref.WeakKeyDictionary()


class Handle:
    """An enabled cache. As a context manager it disables the cache at the end of the block."""

    def __init__(self, engines: dict[str, DenoiserEngine], config: CacheConfig) -> None:
        self._engines = engines
        self._config = config

    @property
    def config(self) -> CacheConfig:
        """The config in force."""
        return self._config

    @property
    def report(self) -> str:
        """What was hooked on which denoiser."""
        return "\n".join(
            f"{name or 'denoiser'}: {engine.label} on {engine.site.describe()}"
            for name, engine in self._engines.items()
        )

    def update(self, **fields: Any) -> None:
        """Change fields of the config while enabled; what is held is let go, hooks stay.

        Raises:
            ValueError: for an unknown field, a bad value, or a change that would need another site.
        """
        with _lock:
            config = self._config.replaced(**fields)
            rules = {name: _rule(config, _alive(engine)) for name, engine in self._engines.items()}
            for name, engine in self._engines.items():
                if rules[name].site != engine.rule.site:
                    raise ValueError("this change needs other hooks; call disable() and enable_cache again")
            for name, engine in self._engines.items():
                engine.update(rules[name], str(config))
            self._config = config

    def stats(self) -> Stats:
        """Statistics of the denoisers of this handle."""
        return Stats(engine.stats() for engine in self._engines.values())

    def disable(self) -> None:
        """Take the cache off; doing it twice is fine."""
        with _lock:
            for engine in self._engines.values():
                _take_off(engine)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()


def enable_cache(
    target: Any,
    config: CacheConfig | str | Any,
    strict: bool = False,
    *,
    progress: bool = True,
    branches: Sequence[str] | None = None,
    **overrides: Any,
) -> Handle:
    """Cache every denoiser of a pipeline, or one denoiser.

    Args:
        target: a `DiffusionPipeline`, a `ModularPipeline` or a denoiser module.
        config: a config, a strategy name such as "first_block", or diffusers' own config object.
        strict: raise at the first call that turns out to have nothing to skip, instead of warning.
        progress: show "reused n/m" in the pipeline's progress bar.
        branches: names of the guidance branches in the order of their calls within a step; found out if left out.
        **overrides: fields of the config to set otherwise.

    Returns:
        A handle to look at, update and disable the cache.

    Raises:
        UnsupportedModelError: nothing can be skipped in a denoiser, or the target has no denoiser.
        CacheConflictError: this cache, diffusers' own or cache-dit's is enabled already.
        ValueError, TypeError: a bad config. In every case nothing is changed.
    """
    chosen = to_config(config, overrides)
    with _lock:
        denoisers = find_denoisers(target)
        if not denoisers:
            raise UnsupportedModelError(
                f"{type(target).__name__} has no denoiser (a component that takes a timestep); pass the module itself"
            )
        for name, module in denoisers.items():
            _refuse_conflicts(target, name, module)
        engines: dict[str, DenoiserEngine] = {}
        try:
            for name, module in denoisers.items():
                engines[name] = _engine(name, module, chosen, strict, progress, branches)
        except BaseException:
            for engine in engines.values():
                engine.remove()
            raise
        for name, module in denoisers.items():
            _engines[module] = engines[name]
            if not isinstance(target, nn.Module):
                engines[name].follow(target)
        handle = Handle(engines, chosen)
        for engine in engines.values():
            engine.roll_back = handle.disable
        return handle


def disable_cache(target: Any) -> None:
    """Take the caches off a pipeline or a denoiser; output is bit-identical to uncached again. No cache is no error.

    A denoiser that the pipeline ran with but no longer has is freed of its cache too.
    """
    with _lock:
        for engine in _engines_of(target):
            _take_off(engine)


@contextmanager
def cached(target: Any, config: CacheConfig | str | Any, strict: bool = False, **options: Any) -> Iterator[Handle]:
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
    return Stats(engine.stats() for engine in _engines_of(target))


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


def _take_off(engine: DenoiserEngine) -> None:
    module = engine.hooked
    if module is not None and _engines.get(module) is engine:
        del _engines[module]
    engine.remove()


def _alive(engine: DenoiserEngine) -> nn.Module:
    module = engine.hooked
    if module is None:
        raise RuntimeError("the denoiser of this handle no longer exists; enable the cache on the new one")
    return module


def _rule(config: CacheConfig, module: nn.Module) -> Rule:
    return find_strategy(config).build(config, module)


def _engine(
    name: str, module: nn.Module, config: CacheConfig, strict: bool, progress: bool, branches: Sequence[str] | None
) -> DenoiserEngine:
    rule = _rule(config, module)
    site = _site(module, rule)
    try:
        return DenoiserEngine(name, module, str(config), site, rule, strict, progress, branches)
    except BaseException:
        site.remove()
        raise


def _site(module: nn.Module, rule: Rule) -> Site:
    core = unwrap(module)
    if core is not module or core._compiled_call_impl is not None:
        raise UnsupportedModelError(
            f"{type(core).__name__} is compiled as a whole, so its blocks can no longer be skipped; "
            f"compile its blocks instead: model.compile_repeated_blocks()"
        )
    if isinstance(rule.site, ModulesSpec):
        compiled = [
            path
            for path, parent in core.named_modules()
            if parent._compiled_call_impl is not None
            for inner in (*rule.site.modules, *rule.site.zeroed)
            if not path or inner.startswith(f"{path}.")
        ]
        if compiled:
            raise UnsupportedModelError(
                f"{compiled[0] or type(core).__name__} is compiled, so hooks on modules inside it never run; predict "
                f"the block stack instead (use_lite_mode=True), or enable the cache without compiling"
            )
        return ModulesSite(rule.site, core)
    if not latent_names(core):
        raise UnsupportedModelError(
            f"{type(core).__name__}.forward names no argument for the latents; give it a parameter hidden_states"
        )
    unet = find_unet(core)
    if unet is not None:
        return StackSite(rule.site, unet.lists(), unet)
    lists = find_block_lists(core)
    if sum(len(item.blocks) for item in lists) < 2:
        raise UnsupportedModelError(
            f"{type(core).__name__} has no list of at least two blocks to skip; keep the blocks of your model in an "
            f"nn.ModuleList and call them one after the other"
        )
    return StackSite(rule.site, lists)


def _refuse_conflicts(target: Any, name: str, module: nn.Module) -> None:
    owner = f"pipe.{name}" if name else "model"
    core = unwrap(module)
    if _find(module) is not None:
        raise CacheConflictError(
            f"{owner} is cached already: change the settings with handle.update(...), or call "
            f"cachekit.disable_cache(...) first"
        )
    if getattr(core, "_cache_config", None) is not None:
        raise CacheConflictError(f"diffusers' own cache is enabled; call {owner}.disable_cache() first")
    for item in (target, core):
        if getattr(item, "_is_cached", False) or hasattr(item, "_context_manager"):
            raise CacheConflictError("cache-dit is enabled on this pipeline; call cache_dit.disable_cache(pipe) first")
