"""What is watched of diffusers and torch while any cache is enabled.

`CacheMixin.cache_context` names guidance branches, `DiffusionPipeline.progress_bar` says that a loop begins,
`nn.Module.compile` would take the place of a hook, and torch's registration hooks tell of replaced modules and
parameters. All are class-level or global, installed with the first cache and removed with the last, so that nothing has
to be stored on a model or a pipeline. Pipelines that use none of them are cached as well.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from diffusers import DiffusionPipeline
from diffusers.models.cache_utils import CacheMixin
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from cachekit.engine.session import known_session

# Re-entrant: garbage collection may finalise a user, and so restore, while this thread holds the lock.
_lock = threading.RLock()
_users: weakref.WeakSet[Any] = weakref.WeakSet()
_originals: list[tuple[type, str, Any]] = []
_handles: list[Any] = []
_contexts = threading.local()
_registrations = itertools.count()
_last_registration = next(_registrations)


def acquire(user: object) -> None:
    """Start watching on behalf of `user`."""
    with _lock:
        _users.add(user)  # first: what is collected meanwhile must find it and restore nothing
        if not _originals:
            _replace(CacheMixin, "cache_context", _watched_context(CacheMixin.cache_context))
            _replace(DiffusionPipeline, "progress_bar", _watched_bar(DiffusionPipeline.progress_bar))
            _replace(nn.Module, "compile", _watched_compile(nn.Module.compile))
            _handles.append(register_module_module_registration_hook(_registered))
            _handles.append(register_module_parameter_registration_hook(_registered))
    weakref.finalize(user, _restore_if_unused)


def release(user: object) -> None:
    """Stop watching when no other user is left. A user that is garbage-collected needs no release."""
    _users.discard(user)
    _restore_if_unused()


def _restore_if_unused() -> None:
    with _lock:
        if not list(_users):
            for owner, name, original in _originals:
                setattr(owner, name, original)
            _originals.clear()
            for handle in _handles:
                handle.remove()
            _handles.clear()


def registrations() -> int:
    """Changes whenever any module of the process was given another submodule or parameter."""
    return _last_registration


def context_name(module: nn.Module | None) -> str | None:
    """Name of the innermost `cache_context` that this thread has entered on `module`."""
    stack = getattr(_contexts, "stack", ())
    return next((name for owner, name in reversed(stack) if owner is module), None)


@contextmanager
def naming(module: nn.Module, name: str) -> Iterator[None]:
    """While active, calls of `module` in this thread belong to the guidance branch `name`."""
    stack = _contexts.__dict__.setdefault("stack", [])
    stack.append((module, name))
    try:
        yield
    finally:
        stack.pop()


def _replace(owner: type, name: str, replacement: Any) -> None:
    original = owner.__dict__[name]
    replacement.__doc__ = original.__doc__
    _originals.append((owner, name, original))
    setattr(owner, name, replacement)


def _registered(module: nn.Module, name: str, value: Any) -> None:
    global _last_registration
    _last_registration = next(_registrations)


def _watched_compile(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for user in list(_users):
            user.compiled(self)
        return result

    return compile


def _watched_context(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def cache_context(self: Any, name: str, **kwargs: Any) -> Iterator[None]:
        with original(self, name, **kwargs), naming(self, name):
            yield

    return cache_context


def _watched_bar(original: Callable[..., Any]) -> Callable[..., Any]:
    def progress_bar(self: Any, *args: Any, **kwargs: Any) -> Any:
        bar = original(self, *args, **kwargs)
        session = known_session(self)
        if session is not None:
            session.loop_started(bar)
        return bar

    return progress_bar
