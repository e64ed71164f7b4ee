"""Notices that the weights or the switches of a denoiser are no longer those of a cached result."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from cachekit.engine import observers
from cachekit.engine.conditioning import version_of

_ADAPTER_FIELDS = ("_active_adapter", "_disable_adapters")
_FREEU_FIELDS = ("s1", "s2", "b1", "b2")


class WeightWatch:
    """Fingerprint of a module tree: modules and parameters in it, in-place counters, and what users switch.

    Loading, unloading, scaling, merging or disabling a LoRA, another attention processor or IP-Adapter scale, FreeU,
    GLIGEN's fuser, replaced parameters and in-place changes alter it. What is replaced is learnt from torch's
    registration hooks, so that a call only sums up counters. Writes through `parameter.data` leave no trace in torch
    and are not seen.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = weakref.ref(root)
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._adapters: list[weakref.ref[nn.Module]] = []
        self._attentions: list[weakref.ref[nn.Module]] = []
        self._switched: list[weakref.ref[nn.Module]] = []
        self._structure: Hashable = None
        self._walk()

    def fingerprint(self) -> Hashable:
        """A value that differs after any change that the class names."""
        return self.setup(), self.writes()

    def setup(self) -> Hashable:
        """The part of the fingerprint that takes little time: all but the writes into parameters."""
        if self._seen != observers.registrations():
            self._walk()
        return self._structure, tuple(self._adapter_state()), tuple(self._switches())

    def writes(self) -> int:
        """How often the parameters that the last `setup` saw were written into; it only grows.

        Reads every parameter: 0.1 us each, several times that when a step of the model has filled the processor's
        caches with other things.
        """
        tensors = (reference() for reference in self._tensors)
        return sum([tensor._version for tensor in tensors if tensor is not None])

    def _adapter_state(self) -> Iterator[Hashable]:
        for reference in self._adapters:
            module = reference()
            if module is not None:
                state = module.__dict__
                yield tuple(state["scaling"].values()), len(state.get("merged_adapters", ()))
                yield tuple(str(state.get(name)) for name in _ADAPTER_FIELDS)

    def _switches(self) -> Iterator[Hashable]:
        """Attention processors and their scales, FreeU, GLIGEN's fuser: plain attributes that torch does not watch."""
        for reference in self._attentions:
            module = reference()
            if module is not None:
                processor = module.__dict__.get("processor") or module._modules.get("processor")
                yield _reference(processor)
                scale = getattr(processor, "scale", None)
                if scale is not None:
                    yield _plain(scale)
        for reference in self._switched:
            module = reference()
            if module is not None:
                yield module.__dict__.get("enabled")
        for block in getattr(self._root(), "up_blocks", ()):
            yield tuple(block.__dict__.get(name) for name in _FREEU_FIELDS)

    def _walk(self) -> None:
        self._seen = observers.registrations()
        root = self._root()
        self._tensors, self._adapters, self._attentions, self._switched = [], [], [], []
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
            if "processor" in module.__dict__ or "processor" in module._modules:
                self._attentions.append(weakref.ref(module))
            if isinstance(module.__dict__.get("enabled"), bool):
                self._switched.append(weakref.ref(module))
        self._structure = hash(tuple(names))


def _reference(value: Any) -> Hashable:
    """Equal as long as it is the same object; keeps nothing alive."""
    try:
        return weakref.ref(value)
    except TypeError:
        return type(value).__qualname__


def _plain(value: Any) -> Hashable:
    """The values of a scale, however it is nested; of a tensor the object and its version."""
    if isinstance(value, torch.Tensor):
        return weakref.ref(value), version_of(value)
    if isinstance(value, Mapping):
        return tuple((str(key), _plain(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item) for item in value)
    return value if isinstance(value, Hashable) else _reference(value)
