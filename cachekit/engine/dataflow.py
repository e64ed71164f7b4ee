"""Which arguments of a denoiser each module call depends on: a dispatch-mode trace with labels.

Every memory block carries a set of labels, one bit for each argument and one, `SOURCE`, for whatever must not reach a
result that is to be reused: the latents, the timestep, random numbers, and memory of unknown origin. What an operation
returns or writes into carries the labels of all that it read. A number that is read back to Python may steer all that
follows, so from then on everything carries its labels.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from cachekit.engine.binding import tensors_in
from cachekit.engine.taint import storage_of

SOURCE = 1
_BEFORE = -1
_UNFILLED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
_FILLED = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
_FROM_PYTHON = ("lift_fresh", "lift_fresh_copy")
_MAX_DEPTH = 6
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial)


@dataclass(frozen=True)
class _Origin:
    """A memory block: its labels, and the number of the operation that made it."""

    storage: StorageWeakRef
    labels: int
    born: int


@dataclass(frozen=True)
class _Place:
    """A parameter of an operation."""

    index: int
    name: str
    default: Any

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return args[self.index] if self.index < len(args) else kwargs.get(self.name, self.default)


@dataclass(frozen=True)
class _Operation:
    """What is known of an operation.

    Attributes:
        writes: the parameters that it writes into.
        draws: True when it may draw random numbers; `unless` one of these is zero or false.
        unfilled: True when it returns memory that something else will fill.
        filled: True when no value of its argument goes into the result, only the form.
        from_python: True when it makes a tensor of Python numbers.
        flops: torch's formula for the number of floating-point operations.
    """

    writes: tuple[_Place, ...]
    draws: bool
    unfilled: bool
    filled: bool
    from_python: bool
    unless: tuple[_Place, ...]
    flops: Callable[..., int] | None

    def is_random(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """True when it draws numbers; dropout of probability 0 or outside of training does not."""
        return self.draws and all(place.of(args, kwargs) not in (0, False) for place in self.unless)


class Frame:
    """What happened during one module call.

    Attributes:
        labels: labels of the tensors that were passed in.
        pure: False once something was written that is older than the call.
        flops: floating-point operations of matrix products, convolutions and attention.
    """

    def __init__(self, born: int, labels: int, flops: int) -> None:
        self.born, self.labels, self.pure = born, labels, True
        self.flops = -flops


class Dataflow(TorchDispatchMode):
    """While active, follows labels from arguments through every operation; views and in-place writes included.

    Args:
        sources: tensors that carry `SOURCE`.
        arguments: name -> tensor; each gets a label of its own.
        known: tensors that carry no label, such as weights.

    Attributes:
        names: the labelled arguments; bit `1 << (i + 1)` stands for `names[i]`.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(
        self, sources: Iterable[torch.Tensor], arguments: Mapping[str, torch.Tensor], known: Iterable[torch.Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = tuple(arguments)
        self._origins: dict[int, _Origin] = {}
        self._frames: list[Frame] = []
        self._clock, self._read_back, self._flops = 0, 0, 0
        for tensor in known:
            self._note(tensor, 0, _BEFORE)
        for bit, tensor in enumerate(arguments.values(), start=1):
            self._note(tensor, self._labels_if_known(tensor) | 1 << bit, _BEFORE)
        for tensor in sources:
            self._note(tensor, self._labels_if_known(tensor) | SOURCE, _BEFORE)

    def reads_source(self) -> None:
        """Something that must not reach a result is known to Python, such as a timestep given as a number."""
        self._read_back |= SOURCE

    def labels(self, value: Any) -> int:
        """Labels of all tensors in `value`; memory of unknown origin counts as `SOURCE`."""
        found = 0
        for tensor in tensors_in(value):
            origin = self._origin(tensor)
            found |= SOURCE if origin is None else origin.labels
        return found

    def named(self, labels: int) -> frozenset[str]:
        """The arguments that `labels` stand for."""
        return frozenset(name for bit, name in enumerate(self.names, start=1) if labels >> bit & 1)

    def add(self, value: Any, labels: int) -> None:
        """Give more labels to all tensors in `value`."""
        for tensor in tensors_in(value):
            origin = self._origin(tensor)
            before, born = (SOURCE, _BEFORE) if origin is None else (origin.labels, origin.born)
            self._note(tensor, before | labels, born)

    def enter(self, arguments: Any) -> Frame:
        """A module call begins."""
        frame = Frame(self._clock, self.labels(arguments), self._flops)
        self._frames.append(frame)
        return frame

    def leave(self, frame: Frame) -> None:
        """A module call ends."""
        self._frames.remove(frame)
        frame.flops += self._flops

    def is_new(self, tensor: torch.Tensor, frame: Frame) -> bool:
        """True when the memory of `tensor` was made during the call."""
        origin = self._origin(tensor)
        return origin is not None and origin.born > frame.born

    def __torch_dispatch__(self, func: Any, classes: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = _operation(func)
        inputs = list(tensors_in((args, kwargs)))
        if operation.from_python:
            for tensor in (tensor for tensor in inputs if self._origin(tensor) is None):
                self._note(tensor, 0, self._clock + 1)
        labels = self._read_back | (0 if operation.filled else self.labels(inputs))
        given = {_key(tensor) for tensor in inputs}
        out = func(*args, **kwargs)
        self._clock += 1
        if isinstance(out, (bool, int, float, complex)):
            self._read_back |= labels
        if operation.unfilled or operation.is_random(args, kwargs):
            labels |= SOURCE
        for place in operation.writes:
            for tensor in tensors_in(place.of(args, kwargs)):
                self._write(tensor, labels)
        for tensor in tensors_in(out):
            if _key(tensor) not in given:
                self._note(tensor, labels, self._clock)
        if operation.flops is not None:
            self._flops += _count(operation.flops, args, kwargs, out)
        return out

    def _write(self, tensor: torch.Tensor, labels: int) -> None:
        origin = self._origin(tensor)
        born = _BEFORE if origin is None else origin.born
        for frame in self._frames:
            if born <= frame.born:
                frame.pure = False
        self._note(tensor, labels | (SOURCE if origin is None else origin.labels), born)

    def _labels_if_known(self, tensor: torch.Tensor) -> int:
        origin = self._origin(tensor)
        return 0 if origin is None else origin.labels

    def _origin(self, tensor: torch.Tensor) -> _Origin | None:
        storage = storage_of(tensor)
        origin = None if storage is None else self._origins.get(storage._cdata)
        return None if origin is None or origin.storage.expired() else origin

    def _note(self, tensor: torch.Tensor, labels: int, born: int) -> None:
        storage = storage_of(tensor)
        if storage is not None:
            self._origins[storage._cdata] = _Origin(StorageWeakRef(storage), labels, born)


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers and all other tensors that hang on a module tree: tables, weights that offloading put aside.

    Module attributes are searched through containers and plain objects; other mappings may read from disk and are
    looked at as objects.
    """
    seen: set[int] = set()
    for part in module.modules():
        yield from _hanging_on(part.__dict__, seen, _MAX_DEPTH)


def _hanging_on(value: Any, seen: set[int], depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, nn.Module) or id(value) in seen or not depth:
        return
    if isinstance(value, dict):
        seen.add(id(value))
        children: Iterable[Any] = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        seen.add(id(value))
        children = list(value)
    elif hasattr(value, "__dict__") and not isinstance(value, _CODE):
        seen.add(id(value))
        children = list(vars(value).values())
    else:
        return
    for child in children:
        yield from _hanging_on(child, seen, depth - 1)


def _key(tensor: torch.Tensor) -> int:
    storage = storage_of(tensor)
    return id(tensor) if storage is None else int(storage._cdata)


@functools.lru_cache(maxsize=4096)
def _operation(func: Any) -> _Operation:
    schema = getattr(func, "_schema", None)
    arguments = list(enumerate(schema.arguments)) if schema else []
    places = {i: _Place(i, item.name, item.default_value) for i, item in arguments}
    packet = getattr(func, "_overloadpacket", None)
    name = getattr(packet, "__name__", "")
    return _Operation(
        writes=tuple(places[i] for i, item in arguments if item.alias_info is not None and item.alias_info.is_write),
        draws=torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()),
        unfilled=name in _UNFILLED,
        filled=name in _FILLED,
        from_python=name in _FROM_PYTHON,
        unless=tuple(places[i] for i, item in arguments if item.name in ("p", "dropout_p", "train")),
        flops=_linear if packet is torch.ops.aten.linear else flop_registry.get(packet),
    )


def _linear(input: torch.Tensor, weight: torch.Tensor, *args: Any, out_val: torch.Tensor, **kwargs: Any) -> int:
    return 2 * out_val.numel() * weight.shape[-1]


def _count(formula: Callable[..., int], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Operations of one call; 0 for a form that torch's formula does not know."""
    try:
        return int(formula(*args, **kwargs, out_val=out))
    except (TypeError, ValueError, AssertionError, IndexError):
        return 0
