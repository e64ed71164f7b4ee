"""The single interception point: a wrapper in front of everything else that a module call runs.

`torch.nn.Module.__call__` first looks at `_compiled_call_impl`. A wrapper stored there runs before forward hooks,
before the `forward` that accelerate, diffusers' group offload or layerwise casting replace, and before a compiled
forward, in whatever order they were enabled. torch drops the attribute when a module is copied or pickled, so copies
are plain.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_SLOT = "_compiled_call_impl"

Inner = Callable[..., Any]
Handler = Callable[[Inner, tuple[Any, ...], dict[str, Any]], Any]


class Hook:
    """Sends the calls of one module through `handler(inner, args, kwargs)` until removed.

    `inner` is what a call would have run without the hook; with `eager` the module's own forward, even when it was
    compiled in place. The module is held weakly: a hook keeps no model alive.
    """

    def __init__(self, module: nn.Module, handler: Handler, eager: bool = False) -> None:
        self._eager = eager
        self._module = weakref.ref(module)
        self._previous: Inner | None = None
        self._had_slot = False
        self._handler = handler
        self._wrapper: Inner | None = None
        self._attach()

    def _attach(self) -> None:
        module = self._module()
        if module is None:
            return
        self._had_slot = _SLOT in module.__dict__
        self._previous = module.__dict__.get(_SLOT)
        previous = None if self._eager else self._previous
        handler, reference = self._handler, self._module

        def hooked_call(*args: Any, **kwargs: Any) -> Any:
            inner = previous
            if inner is None:
                inner = reference()._call_impl  # type: ignore[union-attr]
            return handler(inner, args, kwargs)

        # A compiled caller must not trace the hook. What is compiled further in turns dynamo on again by itself.
        self._wrapper = torch.compiler.disable(hooked_call)
        module.__dict__[_SLOT] = self._wrapper

    @property
    def in_place(self) -> bool:
        """False when a later `module.compile()` took the slot."""
        module = self._module()
        return module is not None and self._wrapper is not None and module.__dict__.get(_SLOT) is self._wrapper

    def ensure(self) -> None:
        """Take the outermost place again after a later `module.compile()`."""
        if self._wrapper is not None and not self.in_place:
            self._attach()

    def remove(self) -> None:
        """Put back what was there; a callable that was stored over the hook later is left alone."""
        module = self._module()
        if module is not None and self.in_place:
            if self._had_slot:
                module.__dict__[_SLOT] = self._previous
            else:
                del module.__dict__[_SLOT]
        self._wrapper = None
