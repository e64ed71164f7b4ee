"""Notices that the weights of a denoiser are no longer those that a cached result was computed with."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator

import torch
from torch import nn

from cachekit.engine import observers

_ADAPTER_FIELDS = ("_active_adapter", "_disable_adapters")


class WeightWatch:
    """Fingerprint of a module tree: modules and parameters in it, in-place counters, adapter switches.

    Loading, unloading, scaling, merging or disabling a LoRA, replaced parameters and in-place changes alter it. What
    is replaced is learnt from torch's registration hooks, so that a call only sums up counters. Writes through
    `parameter.data` leave no trace in torch and are not seen.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = weakref.ref(root)
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._adapters: list[weakref.ref[nn.Module]] = []
        self._structure: Hashable = None
        self._walk()

    def fingerprint(self) -> Hashable:
        """A value that differs after any change that the class names; some 0.1 us per parameter."""
        if self._seen != observers.registrations():
            self._walk()
        tensors = (reference() for reference in self._tensors)
        versions = sum([tensor._version for tensor in tensors if tensor is not None])
        return self._structure, versions, tuple(self._adapter_state())

    def _adapter_state(self) -> Iterator[Hashable]:
        for reference in self._adapters:
            module = reference()
            if module is not None:
                state = module.__dict__
                yield tuple(state["scaling"].values()), len(state.get("merged_adapters", ()))
                yield tuple(str(state.get(name)) for name in _ADAPTER_FIELDS)

    def _walk(self) -> None:
        self._seen = observers.registrations()
        root = self._root()
        self._tensors, self._adapters = [], []
        names = []
        for path, module in root.named_modules() if root is not None else ():
            names.append((path, id(module)))
            for parameter in module._parameters.values():
                if parameter is None:
                    continue
                if not parameter.is_meta:
                    names.append((path, id(parameter)))
                if not parameter.is_inference():
                    self._tensors.append(weakref.ref(parameter))
            if isinstance(module.__dict__.get("scaling"), dict):
                self._adapters.append(weakref.ref(module))
        self._structure = hash(tuple(names))
