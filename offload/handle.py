"""What `offload.enable` returns: how the weights are laid out, what has moved, and the way back."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from cachekit.engine.stats import format_bytes

lock = threading.RLock()
_handles: weakref.WeakKeyDictionary[nn.Module, Handle] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ComponentStats:
    """Where the weights of one component are and what was moved of them since offloading was enabled.

    Attributes:
        offloaded_bytes: bytes of the weights that come and go.
        resident_bytes: bytes of weights and buffers that stay on the execution device.
        moved_bytes: bytes moved to the execution device so far.
        moves: number of times that a group (in the mode "model" the component) was moved.
        notes: what stays although it is large, and why.
    """

    offloaded_bytes: int
    resident_bytes: int
    moved_bytes: int
    moves: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class OffloadStats:
    """Statistics of a handle. `str()` is a table.

    Attributes:
        mode: the mode that is in force.
        device: where the weights compute.
        components: name -> what is known of it; "" for a bare module.
        buffer_bytes: bytes of the buffers that the groups take turns in; 0 where there are none.
        extra_buffers: how often one more buffer was needed because more groups computed at once.
    """

    mode: str
    device: torch.device
    components: Mapping[str, ComponentStats]
    buffer_bytes: int = 0
    extra_buffers: int = 0

    @property
    def moved_bytes(self) -> int:
        """Bytes moved so far, over all components."""
        return sum(item.moved_bytes for item in self.components.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights that stay on the execution device, without the buffers."""
        return sum(item.resident_bytes for item in self.components.values())

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of weights that come and go."""
        return sum(item.offloaded_bytes for item in self.components.values())

    def __str__(self) -> str:
        buffers = f", buffers of {format_bytes(self.buffer_bytes)}" if self.buffer_bytes else ""
        lines = [f"{self.mode} on {self.device}{buffers}"]
        for name, item in self.components.items():
            lines.append(
                f"  {name or 'module'}: {format_bytes(item.offloaded_bytes)} offloaded, "
                f"{format_bytes(item.resident_bytes)} resident, {format_bytes(item.moved_bytes)} moved in {item.moves} "
                f"moves"
            )
            lines.extend(f"    note: {note}" for note in item.notes)
        return "\n".join(lines)


class Mode(Protocol):
    """A mode at work on a pipeline."""

    @property
    def buffer_bytes(self) -> int: ...

    def components(self) -> dict[str, ComponentStats]: ...

    @property
    def extra_buffers(self) -> int: ...

    def remove(self) -> None:
        """Put everything back."""
        ...


class Handle:
    """Offloading in force. As a context manager it ends with the block.

    Attributes:
        mode: name of the mode; "none" where there is nothing to offload to.
        device: where the weights compute.
        reason: why nothing was changed; "" otherwise.
    """

    def __init__(self, mode: str, device: torch.device, work: Mode | None = None, reason: str = "") -> None:
        self.mode, self.device, self.reason = mode, device, reason
        self._work = work
        self._last: OffloadStats | None = None

    @property
    def active(self) -> bool:
        """False once disabled, or when there was nothing to do."""
        return self._work is not None

    @property
    def report(self) -> str:
        """What is where."""
        return self.reason or str(self.stats())

    def stats(self) -> OffloadStats:
        """Bytes of weights that stay, come and go, and have moved; after `disable` those of the end."""
        if self._work is None:
            return self._last or OffloadStats(self.mode, self.device, {})
        work = self._work
        return OffloadStats(self.mode, self.device, work.components(), work.buffer_bytes, work.extra_buffers)

    def disable(self) -> None:
        """Put weights, devices and hooks back as they were; doing it twice is fine."""
        with lock:
            if self._work is None:
                return
            self._last, work = self.stats(), self._work
            work.remove()
            self._work = None
            for module in [module for module, handle in _handles.items() if handle is self]:
                del _handles[module]

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()

    def __repr__(self) -> str:
        return f"<Handle: {self.report}>"


@dataclass
class Undo:
    """Steps that lead back, run in reverse."""

    steps: list[Callable[[], Any]] = field(default_factory=list)

    def add(self, step: Callable[[], Any]) -> None:
        self.steps.append(step)

    def run(self) -> None:
        while self.steps:
            self.steps.pop()()


def modules_of(target: Any) -> dict[str, nn.Module]:
    """Name -> component of a pipeline; a module is taken as it is, named "".

    Raises:
        TypeError: it is neither.
    """
    if isinstance(target, nn.Module):
        return {"": target}
    components = getattr(target, "components", None)
    if not isinstance(components, dict):
        raise TypeError(f"expected a pipeline or a module, got {type(target).__name__}")
    return {name: item for name, item in components.items() if isinstance(item, nn.Module)}


def handles_of(target: Any) -> list[Handle]:
    """The handles in force on the components of a target."""
    return list(dict.fromkeys(_handles[item] for item in modules_of(target).values() if item in _handles))


def remember(target: Any, handle: Handle) -> None:
    """A handle is in force on a target."""
    for module in modules_of(target).values():
        _handles[module] = handle


def total_bytes(module: nn.Module) -> int:
    """Bytes of all weights and buffers, what is tied once."""
    return sum(tensor.nbytes for tensor in _tensors(module))


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
