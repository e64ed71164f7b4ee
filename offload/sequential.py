"""The mode "sequential": accelerate's offloading leaf by leaf, made reversible, with its bytes counted."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module
from torch import nn

from cachekit.engine.hooks import Hook, Inner
from offload.handle import modules_of
from offload.hooked import DEPTH, Hooked, NoOptions, prepared
from offload.standins import ADDING, FUSING, watch


def offload_sequentially(pipe: Any, device: torch.device, options: NoOptions) -> Hooked:
    """Leaf by leaf, with weights on the meta device until they are used."""
    work = prepared(pipe)
    try:
        kept = getattr(pipe, "_exclude_from_cpu_offload", ())
        for name, module in modules_of(pipe).items():
            module.to(device if name in kept else "cpu")
            if name not in kept:
                leaves = Leaves(work, name, module, device)
                work.undo.add(leaves.stop_counting)
                leaves.attach()
                work.undo.add(watch(module, (*ADDING, *FUSING), leaves.held).run)
    except BaseException:
        work.remove()
        raise
    return work


class Leaves:
    """The hooks on the leaves of one component."""

    def __init__(self, work: Hooked, name: str, component: nn.Module, device: torch.device) -> None:
        self._work, self._name, self._device = work, name, device
        self._component = weakref.ref(component)
        self._counters: list[Hook] = []

    def attach(self) -> None:
        """Move the weights away and let each leaf fetch its own."""
        component = self._component()
        if component is None:
            return
        cpu_offload(component, self._device, offload_buffers=len(component._parameters) > 0)
        for leaf in component.modules():
            if getattr(getattr(leaf, "_hf_hook", None), "offload", False):
                self._counters.append(Hook(leaf, self._counting(leaf), depth=DEPTH))

    @contextmanager
    def held(self) -> Iterator[None]:
        """The weights are in host memory meanwhile."""
        self.stop_counting()
        component = self._component()
        if component is not None:
            remove_hook_from_module(component, recurse=True)
        try:
            yield
        finally:
            self.attach()

    def stop_counting(self) -> None:
        """Take our own hooks off."""
        while self._counters:
            self._counters.pop().remove()

    def _counting(self, leaf: nn.Module) -> Callable[..., Any]:
        place = weakref.ref(leaf)

        def handler(inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            component, module = self._component(), place()
            if component is not None and module is not None:
                self._work.moved(self._name, component, sum(item.nbytes for item in module.parameters(recurse=False)))
            return inner(*args, **kwargs)

        return handler
