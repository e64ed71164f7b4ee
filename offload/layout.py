"""A group: the weights that come and go together, and how they lie in a buffer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

_ALIGNMENT = 256
_LINE = 64
"""Bytes of a cache line. Kernels of the CPU begin with the elements before the next one, so that rounding depends on
where in its line a tensor begins; weights that are mapped from a file begin anywhere."""


@dataclass(frozen=True)
class Entry:
    """One parameter of a group.

    Attributes:
        name: its path in the component.
        parameter: the object whose `data` is exchanged; it stays the same.
        offset: where it begins in the buffer, in bytes.
        stride: of its elements there; any dense order.
        home: the device that it came from and goes back to.
        shift: bytes between the begin of its cache line and its own, where it came from.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    home: torch.device
    shift: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        return self.stride == contiguous(self.shape)

    def raw(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its bytes in a flat uint8 buffer."""
        return buffer[self.offset : self.offset + self.nbytes]

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """It itself in a flat uint8 buffer."""
        return self.raw(buffer).view(self.dtype).as_strided(self.shape, self.stride)


class Group:
    """The weights of one module that are fetched together.

    Args:
        name: path of the module in its component.
        chain: the module and those around it, innermost first, the component last; held weakly.
        parameters: path in the component -> parameter.
        device: where the weights will compute.
    """

    def __init__(
        self, name: str, chain: list[nn.Module], parameters: dict[str, nn.Parameter], device: torch.device
    ) -> None:
        self.name = name
        self._chain = [weakref.ref(module) for module in chain]
        self.entries: list[Entry] = []
        offset = 0
        for path, parameter in parameters.items():
            data = parameter.data
            stride = tuple(data.stride()) if is_dense(data) else contiguous(data.shape)
            shift = shift_of(data)
            begin = offset + (shift if device.type == "cpu" else 0)
            self.entries.append(
                Entry(path, parameter, tuple(data.shape), stride, data.dtype, begin, parameter.device, shift)
            )
            offset = -(-(begin + data.nbytes) // _ALIGNMENT) * _ALIGNMENT
        self.buffer_bytes = offset
        self.nbytes = sum(entry.nbytes for entry in self.entries)

    @property
    def module(self) -> nn.Module:
        """The module that is hooked."""
        module = self._chain[0]()
        assert module is not None
        return module

    def chain(self, with_component: bool) -> Iterator[nn.Module]:
        """The module and those around it, with or without the component."""
        references = self._chain if with_component else self._chain[:-1]
        return (module for reference in references if (module := reference()) is not None)

    def point_at(self, buffer: torch.Tensor) -> None:
        """Let the parameters be what lies in a buffer."""
        with torch.inference_mode(False), torch.no_grad():
            for entry in self.entries:
                entry.parameter.data = entry.view(buffer)


def shift_of(tensor: torch.Tensor) -> int:
    """Bytes between the begin of the cache line that a tensor begins in and its own; 0 outside of host memory."""
    if tensor.device.type != "cpu":
        return 0
    return shift_at(tensor.data_ptr(), tensor.dtype)


def shift_at(address: int, dtype: torch.dtype) -> int:
    """The same for an address; 0 for one at which no tensor of this dtype can begin."""
    shift = address % _LINE
    return shift if shift % dtype.itemsize == 0 else 0


def empty_at(
    shift: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """An uninitialised dense tensor of which `shift_of` is `shift`."""
    if not shift:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.empty(_LINE + nbytes, dtype=torch.uint8, device=device)
    begin = (shift - raw.data_ptr()) % _LINE
    return raw[begin : begin + nbytes].view(dtype).as_strided(shape, stride)


def returned(tensor: torch.Tensor, home: torch.device, shift: int) -> torch.Tensor:
    """A copy of a tensor on the device that it came from, at the same place in its cache line."""
    if not is_dense(tensor):
        return tensor.to(home)
    return empty_at(shift, tuple(tensor.shape), tensor.stride(), tensor.dtype, home).copy_(tensor)


def contiguous(shape: tuple[int, ...] | torch.Size) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def is_dense(tensor: torch.Tensor) -> bool:
    """True when the elements fill a stretch of memory without gaps or overlaps."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= max(length, 1)
    return tensor.numel() > 0 or tensor.is_contiguous()
