"""Follows the latents through one forward pass, to tell image streams from text refiners and the like."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from cachekit.engine.binding import tensors_in


class Taint(TorchDispatchMode):
    """While active, marks the storage of everything computed from `sources`; views and in-place writes included.

    Blocks run outside of it (:meth:`suspended`) and are followed as a whole, so that what is compiled inside them is
    left alone. Storages are held weakly: no activation lives longer than it would without the trace.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, sources: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._marked: dict[int, StorageWeakRef] = {}
        self.mark(tuple(sources))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Step out of the mode."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    def mark(self, value: Any) -> None:
        """Say that all tensors in `value` depend on the sources."""
        for tensor in tensors_in(value):
            self._mark(tensor)

    def reaches(self, value: Any) -> bool:
        """True when any tensor in `value` depends on the sources."""
        return any(self._is_marked(tensor) for tensor in tensors_in(value))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if any(self._is_marked(tensor) for tensor in tensors_in((args, kwargs))):
            self.mark(out)
            schema = getattr(func, "_schema", None)
            for argument, value in zip(schema.arguments if schema else (), args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self.mark(value)
        return out

    def _is_marked(self, tensor: torch.Tensor) -> bool:
        storage = storage_of(tensor)
        reference = None if storage is None else self._marked.get(storage._cdata)
        return reference is not None and not reference.expired()

    def _mark(self, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        if storage is not None:
            self._marked[storage._cdata] = StorageWeakRef(storage)


@dataclass(frozen=True)
class Where:
    """The memory of a tensor, held weakly."""

    storage: StorageWeakRef
    offset: int
    strides: tuple[int, ...]

    def holds(self, tensor: torch.Tensor) -> bool:
        """True when `tensor` is laid out in the same memory, which has not been freed meanwhile."""
        storage = storage_of(tensor)
        return (
            storage is not None
            and storage._cdata == self.storage.cdata
            and not self.storage.expired()
            and (tensor.storage_offset(), tensor.stride()) == (self.offset, self.strides)
        )


def place_of(tensor: torch.Tensor) -> Where | None:
    """Where a tensor lies; None for tensor subclasses without memory of their own."""
    storage = storage_of(tensor)
    return None if storage is None else Where(StorageWeakRef(storage), int(tensor.storage_offset()), tensor.stride())


def storage_of(tensor: torch.Tensor) -> Any | None:
    """The storage, or None for tensor subclasses that have none of their own."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None
