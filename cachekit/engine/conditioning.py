"""What a denoiser call is conditioned on, and whether that is what it was before.

Tensors are compared by object and version first, which costs nothing; only when that fails is one comparison of values
made on the device (and counted). Never by address: a prompt overwritten in place, or one that took the memory of an
old one, is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

_MAX_DEPTH = 4


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor as it was: the object, its version, and a copy where torch keeps no version (inference tensors)."""

    tensor: torch.Tensor
    version: int | None
    copy: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLeaf:
        version = version_of(tensor)
        return cls(tensor, version, tensor.clone() if version is None else None)

    @property
    def signature(self) -> tuple[Any, ...]:
        return tuple(self.tensor.shape), self.tensor.dtype, self.tensor.device

    def same_object(self, other: TensorLeaf) -> bool:
        return self.tensor is other.tensor and self.version is not None and self.version == other.version

    def overwritten(self) -> bool:
        """True when the kept tensor is known to hold other values by now."""
        return self.version is not None and version_of(self.tensor) != self.version

    def value(self) -> torch.Tensor:
        return self.tensor if self.copy is None else self.copy


def version_of(tensor: torch.Tensor) -> int | None:
    """torch's in-place counter; None for inference tensors, which have none."""
    try:
        return tensor._version
    except RuntimeError:
        return None


@dataclass(frozen=True)
class Hint:
    """Stands for a tensor that a watched control network has just returned: it counts by its form only."""

    signature: tuple[Any, ...]


Leaf = TensorLeaf | Hint | Any


@dataclass
class Conditioning:
    """The flattened arguments of a call, without the latents and the timestep."""

    leaves: dict[str, Leaf]

    @classmethod
    def of(
        cls,
        arguments: Mapping[str, Any],
        excluded: frozenset[str],
        is_hint: Callable[[torch.Tensor], bool] | None = None,
    ) -> Conditioning:
        leaves: dict[str, Leaf] = {}
        for name, value in arguments.items():
            if name not in excluded:
                leaves.update(_flatten(name, value, _MAX_DEPTH))
        if is_hint is not None:
            for name, leaf in leaves.items():
                if isinstance(leaf, TensorLeaf) and is_hint(leaf.tensor):
                    leaves[name] = Hint(leaf.signature)
        return cls(leaves)


@dataclass
class Difference:
    """How one call's conditioning differs from another's."""

    changed: set[str] = field(default_factory=set)
    reshaped: set[str] = field(default_factory=set)
    structural: set[str] = field(default_factory=set)
    equal: int = 0

    @property
    def nothing(self) -> bool:
        return not (self.changed or self.reshaped or self.structural)


@dataclass
class Comparer:
    """Compares conditionings and counts the values read back from the device."""

    syncs: int = 0
    _memo: dict[tuple[int, int], bool] = field(default_factory=dict)

    def take(self) -> int:
        """Values read back since the last call of this method; forgets the pairs compared so far."""
        count, self.syncs = self.syncs, 0
        self._memo.clear()
        return count

    def compare(self, old: Conditioning, new: Conditioning, ignored: set[str], by_value: bool = True) -> Difference:
        """Differences of `new` against `old`; `ignored` tensors only count by shape and presence."""
        difference = Difference()
        for name in old.leaves.keys() | new.leaves.keys():
            before, after = old.leaves.get(name), new.leaves.get(name)
            if not (isinstance(before, TensorLeaf) and isinstance(after, TensorLeaf)):
                if isinstance(before, TensorLeaf) or isinstance(after, TensorLeaf) or not _same_plain(before, after):
                    difference.structural.add(name)
                continue
            if before.signature != after.signature:
                difference.reshaped.add(name)
            elif name in ignored:
                continue
            elif before.same_object(after) or (by_value and self._same_values(before, after)):
                difference.equal += 1
            else:
                difference.changed.add(name)
        return difference

    def same(self, before: TensorLeaf, after: TensorLeaf) -> bool:
        """True when two tensors are known to hold equal values in the same form."""
        if before.signature != after.signature:
            return False
        return before.same_object(after) or self._same_values(before, after)

    def strengths(self, conditioning: Conditioning, names: set[str]) -> dict[str, float]:
        """Norms of some tensors, read back together."""
        leaves = {name: conditioning.leaves[name] for name in sorted(names) if name in conditioning.leaves}
        tensors = {name: leaf.tensor for name, leaf in leaves.items() if isinstance(leaf, TensorLeaf)}
        if not tensors:
            return {}
        self.syncs += 1
        norms = torch.stack([torch.linalg.vector_norm(tensor.float()) for tensor in tensors.values()])
        return dict(zip(tensors, norms.tolist(), strict=True))

    def _same_values(self, before: TensorLeaf, after: TensorLeaf) -> bool:
        if before.overwritten():
            return False
        key = id(before), id(after)
        if key not in self._memo:
            self.syncs += 1
            self._memo[key] = bool(torch.equal(before.value(), after.tensor))
        return self._memo[key]


def _same_plain(before: Any, after: Any) -> bool:
    if before is after:
        return True
    try:
        return bool(before == after)
    except Exception:
        return False


def _flatten(name: str, value: Any, depth: int) -> Iterator[tuple[str, Leaf]]:
    if isinstance(value, torch.Tensor):
        yield name, TensorLeaf.of(value)
    elif isinstance(value, Mapping) and depth:
        for key, item in value.items():
            yield from _flatten(f"{name}.{key}", item, depth - 1)
    elif isinstance(value, (list, tuple)) and depth:
        for index, item in enumerate(value):
            yield from _flatten(f"{name}[{index}]", item, depth - 1)
    else:
        yield name, value
