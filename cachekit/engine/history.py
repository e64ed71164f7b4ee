"""What was computed before: the last few results of one site in one branch."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cachekit.engine.binding import tensors_in
from cachekit.engine.halves import Half


@dataclass(frozen=True)
class Storage:
    """Where and how results are kept: in another dtype, or on another device, than they were computed in."""

    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as it is kept. Never the model's own tensor unless nothing else can write to it."""
        return tensor.detach().to(device=self.device, dtype=self.dtype or tensor.dtype)


AS_COMPUTED = Storage()


@dataclass
class Entry:
    """One computed call.

    Attributes:
        step: step in which it was computed.
        values: what can be predicted, by place.
        passive: outputs that continue no argument, by place; handed out again as they were.
        signal: what the gate compares (the probe's residual), if any.
        primary: the places in `values` that belong to the latent stream.
        half: the half of a doubled batch that `values` hold; None for all of it.
    """

    step: int
    values: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    passive: dict[Hashable, Any] = field(default_factory=dict)
    signal: torch.Tensor | None = None
    primary: tuple[Hashable, ...] = ()
    half: Half | None = None

    def serves(self, half: Half | None) -> bool:
        """Whether a call on a half of the batch (None for all of it) can be answered from this one."""
        return self.half is None or self.half == half

    def value(self, place: Hashable, half: Half | None) -> torch.Tensor | None:
        """What was computed at a place, for a call on a half of the batch (None for all of it)."""
        tensor = self.values.get(place) if self.serves(half) else None
        return tensor if tensor is None or half is None or self.half is not None else half.take(tensor)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.values.values()
        for value in self.passive.values():
            yield from tensors_in(value)
        if self.signal is not None:
            yield self.signal


class History:
    """The last `depth` computed calls, newest first. Only the newest keeps its signal and passive outputs."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._entries: deque[Entry] = deque()
        self._bytes: int | None = 0

    @property
    def depth(self) -> int:
        """Number of computed calls that are kept."""
        return self._depth

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the kept calls, newest first."""
        return tuple(entry.step for entry in self._entries)

    @property
    def newest(self) -> Entry | None:
        return self._entries[0] if self._entries else None

    def values(self, key: Hashable, half: Half | None = None) -> tuple[Sequence[int], Sequence[torch.Tensor]]:
        """Steps and tensors of one place, newest first; calls whose tensor had another shape are left out.

        `half` is the half of the batch that is asked for, None for all of it.
        """
        steps: list[int] = []
        tensors: list[torch.Tensor] = []
        for entry in self._entries:
            tensor = entry.value(key, half)
            if tensor is None or (tensors and tensor.shape != tensors[0].shape):
                break
            steps.append(entry.step)
            tensors.append(tensor)
        return steps, tensors

    def push(self, entry: Entry) -> None:
        self._bytes = None
        for old in self._entries:
            old.signal, old.passive = None, {}
        self._entries.appendleft(entry)
        while len(self._entries) > self._depth:
            self._entries.pop()

    def make_room(self) -> None:
        """Let go of what the next `push` would drop anyway, before the model runs."""
        while len(self._entries) >= max(self._depth, 1):
            self._entries.pop()
            self._bytes = None

    def drop(self, places: Iterable[Hashable]) -> None:
        """Let go of the results of some places."""
        for place in places:
            self._bytes = None
            for entry in self._entries:
                entry.values.pop(place, None)

    def clear(self) -> None:
        self._entries.clear()
        self._bytes = 0

    def nbytes(self) -> int:
        """Bytes held, each storage counted once."""
        if self._bytes is None:
            self._bytes = self._count()
        return self._bytes

    def _count(self) -> int:
        seen = {}
        for entry in self._entries:
            for tensor in entry.tensors():
                storage = tensor.untyped_storage()
                seen[storage._cdata] = storage.nbytes()
        return sum(seen.values())
