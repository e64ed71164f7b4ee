"""What stands in for methods of a component while its weights are offloaded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from offload.errors import OffloadError
from offload.handle import Undo

ADDING = ("add_adapter", "load_adapter", "load_lora_adapter")
"""Methods that add adapters (LoRA)."""
FUSING = ("fuse_lora", "unfuse_lora")
"""Methods that write adapters into the weights, or take them out again."""


class Uncopyable:
    """Lets a copy or pickle of the module that it is attached to fail with a message."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise OffloadError("a model cannot be copied while its weights are offloaded; call handle.disable() first")

    def __reduce__(self) -> Any:
        raise OffloadError(
            "a model cannot be pickled while its weights are offloaded; use save_pretrained, or call handle.disable()"
        )


def watch(module: nn.Module, methods: Sequence[str], held: Callable[[], AbstractContextManager[None]]) -> Undo:
    """Let methods of a module, where it has them, run inside `held()`.

    An adapter follows the weights that it is for to the device that they are on. Where that is the meta device its
    values would be lost, so there `held` has to bring the weights back for as long as it lasts.

    Returns:
        The way back.
    """
    undo = Undo()
    for name in methods:
        if hasattr(module, name):
            undo.add(_StandIn(module, name, held).remove)
    return undo


class _StandIn(Uncopyable):
    """Stands in for one method of one module."""

    def __init__(self, module: nn.Module, name: str, held: Callable[[], AbstractContextManager[None]]) -> None:
        self._module, self._name, self._held = weakref.ref(module), name, held
        self._own = module.__dict__.get(name)
        module.__dict__[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        if "_pipeline" in kwargs:
            kwargs["_pipeline"] = None  # diffusers would put its own offloading in the place of ours
        add = self._own or getattr(type(module), self._name).__get__(module)
        with self._held():
            return add(*args, **kwargs)

    def remove(self) -> None:
        """Give the method back."""
        module = self._module()
        if module is not None and module.__dict__.get(self._name) is self:
            del module.__dict__[self._name]
            if self._own is not None:
                module.__dict__[self._name] = self._own
