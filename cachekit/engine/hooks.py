"""The single interception point: a wrapper in front of everything else that a module call runs.

`torch.nn.Module.__call__` first looks at `_compiled_call_impl`. A wrapper stored there runs before forward hooks,
before the `forward` that accelerate, diffusers' group offload or layerwise casting replace, and before a compiled
forward, in whatever order they were enabled. torch drops the attribute when a module is copied or pickled, so copies
are plain.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, Protocol

import torch
from torch import nn

_SLOT = "_compiled_call_impl"

Inner = Callable[..., Any]
Handler = Callable[[Inner, tuple[Any, ...], dict[str, Any]], Any]


class Outlook(Protocol):
    """Tells whether calls of a hooked module get past its hook; None where that is not known."""

    def now(self) -> bool | None:
        """The next call, within the denoiser call that is in flight in this thread."""
        ...

    def later(self) -> bool | None:
        """Any call in a later denoiser call of the run that is in flight in this thread."""
        ...


class Hook:
    """Sends the calls of one module through `handler(inner, args, kwargs)` until removed.

    `inner` is what a call would have run without the hook; with `eager` the module's own forward, even when it was
    compiled in place. Several hooks on one module are nested, the latest outermost, and can be removed in any order;
    those of a lower `depth` are always inside the others. `outlook` tells what the handler will do.
    The module is held weakly: a hook keeps no model alive.
    """

    def __init__(
        self, module: nn.Module, handler: Handler, eager: bool = False, depth: int = 0, outlook: Outlook | None = None
    ) -> None:
        self.handler, self.eager, self.depth, self.outlook = handler, eager, depth, outlook
        with _lock:
            self._point: _Point | None = _Point.of(module)
            self._point.change(tuple(sorted((*self._point.hooks, self), key=lambda hook: hook.depth)))

    def set_eager(self, eager: bool) -> None:
        """Switch between the module's own forward and the one compiled in place."""
        self.eager = eager
        if self._point is not None:
            self._point.change(self._point.hooks)

    @property
    def module(self) -> nn.Module | None:
        """The hooked module; None once the hook is removed or the module gone."""
        return None if self._point is None else self._point.module

    @property
    def in_place(self) -> bool:
        """False when a later `module.compile()` took the slot."""
        return self._point is not None and self._point.in_place

    def ensure(self) -> None:
        """Take the outermost place again after a later `module.compile()`."""
        if self._point is not None:
            self._point.ensure()

    def remove(self) -> None:
        """Put back what was there; a callable that was stored over the hook later is left alone."""
        with _lock:
            point, self._point = self._point, None
            if point is not None:
                point.change(tuple(hook for hook in point.hooks if hook is not self))


class _Point:
    """All hooks of one module: the wrapper in its slot, there as long as a hook is."""

    def __init__(self, module: nn.Module) -> None:
        self.hooks: tuple[Hook, ...] = ()
        self._handler: Handler = _call
        self._eager = False
        self._module = weakref.ref(module)
        self._previous: Inner | None = None
        self._had_slot = False
        self._wrapper: Inner | None = None

    @classmethod
    def of(cls, module: nn.Module) -> _Point:
        known = _points.get(id(module))
        if known is None or known._module() is not module:
            known = _points[id(module)] = cls(module)
        return known

    @property
    def module(self) -> nn.Module | None:
        return self._module()

    @property
    def replaces_compiled(self) -> bool:
        """True when a compiled call stands behind the wrapper."""
        return self._previous is not None

    def change(self, hooks: tuple[Hook, ...]) -> None:
        had, self.hooks = bool(self.hooks), hooks
        self._eager = any(hook.eager for hook in hooks)
        self._handler = reduce(_around, (hook.handler for hook in hooks)) if hooks else _call
        if hooks and not had:
            self._attach()
        elif had and not hooks:
            self._detach()

    @property
    def in_place(self) -> bool:
        module = self._module()
        return module is not None and self._wrapper is not None and module.__dict__.get(_SLOT) is self._wrapper

    def ensure(self) -> None:
        if self._wrapper is not None and not self.in_place:
            self._attach()

    def _attach(self) -> None:
        module = self._module()
        if module is None:
            return
        self._had_slot = _SLOT in module.__dict__
        self._previous = previous = module.__dict__.get(_SLOT)
        reference = self._module

        def hooked_call(*args: Any, **kwargs: Any) -> Any:
            inner = previous
            if inner is None or self._eager:
                inner = reference()._call_impl  # type: ignore[union-attr]
            return self._handler(inner, args, kwargs)

        # A compiled caller must not trace the hook. What is compiled further in turns dynamo on again by itself.
        self._wrapper = torch.compiler.disable(hooked_call)
        module.__dict__[_SLOT] = self._wrapper

    def _detach(self) -> None:
        module = self._module()
        if module is not None:
            if self.in_place and self._had_slot:
                module.__dict__[_SLOT] = self._previous
            elif self.in_place:
                del module.__dict__[_SLOT]
        self._wrapper = None


def outlooks(module: nn.Module) -> list[Outlook]:
    """What the hooks of a module tell about its calls."""
    point = _points.get(id(module))
    hooks = point.hooks if point is not None and point.module is module else ()
    return [hook.outlook for hook in hooks if hook.outlook is not None]


def is_compiled(module: nn.Module) -> bool:
    """True when `module.compile()` was called, whether or not hooks were put in front of it."""
    point = _points.get(id(module))
    if point is not None and point.module is module and point.in_place:
        return point.replaces_compiled
    return module._compiled_call_impl is not None


def compiled_parent(root: nn.Module, paths: Iterable[str]) -> str | None:
    """Path of a compiled module of `root` that has one of `paths` inside, so that hooks there never run; or None."""
    inner = tuple(paths)
    for path, module in root.named_modules():
        wrapped = isinstance(module._modules.get("_orig_mod"), nn.Module)
        if (wrapped or is_compiled(module)) and (not path or any(name.startswith(f"{path}.") for name in inner)):
            return str(path)
    return None


# Re-entrant: garbage collection may remove a hook while this thread holds the lock.
_lock = threading.RLock()
_points: weakref.WeakValueDictionary[int, _Point] = weakref.WeakValueDictionary()


def _call(inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return inner(*args, **kwargs)


def _around(first: Handler, second: Handler) -> Handler:
    """Both handlers as one, the second outside."""

    def handler(inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return second(lambda *given, **named: first(inner, given, named), args, kwargs)

    return handler
