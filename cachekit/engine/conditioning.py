"""What a denoiser call is conditioned on, and which guidance branch it therefore belongs to.

Tensors are compared by object and version first, which costs nothing; only when that fails is one comparison of values
made on the device (and counted). Never by address: a prompt overwritten in place, or one that took the memory of an
old one, is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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


Leaf = TensorLeaf | Any


@dataclass
class Conditioning:
    """The flattened arguments of a call, without the latents and the timestep."""

    leaves: dict[str, Leaf]

    @classmethod
    def of(cls, arguments: Mapping[str, Any], excluded: frozenset[str]) -> Conditioning:
        leaves: dict[str, Leaf] = {}
        for name, value in arguments.items():
            if name not in excluded:
                leaves.update(_flatten(name, value, _MAX_DEPTH))
        return cls(leaves)

    def structure(self) -> dict[str, Any]:
        """Everything but tensor values: what is None, what is a tensor, scalars."""
        return {name: "tensor" if isinstance(leaf, TensorLeaf) else leaf for name, leaf in self.leaves.items()}


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


@dataclass
class Branch:
    """One guidance branch: its name and what it was last called with."""

    name: str
    conditioning: Conditioning
    position: int
    step: int
    timestep: Any = None
    dynamic: set[str] = field(default_factory=set)
    streaks: dict[str, int] = field(default_factory=dict)
    strengths: dict[str, float] = field(default_factory=dict)
    is_over: bool = False

    def let_go(self) -> None:
        """Keep no tensor alive."""
        self.conditioning, self.timestep = Conditioning({}), None


@dataclass
class Match:
    """The branch of a call and whether its conditioning is what it was."""

    branch: Branch
    is_new: bool
    difference: Difference


_ORDINALS = ("cond", "uncond")
_DYNAMIC_AFTER = 2
_MOST_BRANCHES = 6
_JUMP = 4.0


@dataclass
class BranchBook:
    """The branches of one run.

    A call belongs to the branch that its `cache_context` names; without a name to the branch with equal conditioning;
    failing that to the branch that was called at the same place of the previous step.
    """

    comparer: Comparer = field(default_factory=Comparer)
    branches: list[Branch] = field(default_factory=list)
    _step: int = -1
    _called: list[Branch] = field(default_factory=list)

    def begin_step(self, step: int) -> None:
        """Tell the book which step the next call belongs to."""
        if step != self._step:
            self._step, self._called = step, []

    def last_step(self) -> None:
        """Keep nothing of branches that were called in this last step, or no longer in the step before."""
        for branch in self.branches:
            if branch in self._called or branch.step < self._step - 1:
                branch.is_over = True
                branch.let_go()

    def let_go(self) -> None:
        """Keep no tensor alive."""
        for branch in self.branches:
            branch.let_go()

    def peek(self, conditioning: Conditioning, name: str | None) -> str | None:
        """Name of the known branch that this conditioning equals, without recording the call."""
        if name is not None:
            return name
        found = self._equal(conditioning, self.branches)
        return None if found is None else found.name

    @property
    def first_timestep(self) -> Any:
        """Timestep argument of the first branch."""
        return self.branches[0].timestep if self.branches else None

    @property
    def called(self) -> int:
        """Number of calls in the current step so far."""
        return len(self._called)

    def earlier_timestep(self, conditioning: Conditioning, name: str | None) -> Any | None:
        """Timestep argument of the call of the same branch in this step, if there was one; reads nothing back."""
        for branch in self._called:
            if name is not None:
                if branch.name == name:
                    return branch.timestep
            elif self.comparer.compare(branch.conditioning, conditioning, branch.dynamic, by_value=False).nothing:
                return branch.timestep
        if len(self._called) >= _MOST_BRANCHES:
            return self._called[0].timestep
        return None

    def match(self, conditioning: Conditioning, name: str | None, timestep: Any) -> Match:
        """Find or make the branch of this call and record the call."""
        position = len(self._called)
        free = [branch for branch in self.branches if branch not in self._called]
        if name is not None:
            taken = sum(called.name.split("#")[0] == name for called in self._called)
            full = name if not taken else f"{name}#{taken + 1}"
            found = next((branch for branch in free if branch.name == full), None)
            return self._record(found, full, conditioning, position, timestep)
        ordered = sorted(free, key=lambda branch: branch.position != position)
        found = self._equal(conditioning, ordered) or self._closest(conditioning, ordered)
        return self._record(found, self._next_name(), conditioning, position, timestep)

    def _equal(self, conditioning: Conditioning, candidates: list[Branch]) -> Branch | None:
        for by_value in (False, True):
            for branch in candidates:
                difference = self.comparer.compare(branch.conditioning, conditioning, branch.dynamic, by_value)
                if difference.nothing:
                    return branch
        return None

    def _closest(self, conditioning: Conditioning, candidates: list[Branch]) -> Branch | None:
        """The branch that shares most tensors; only branches of earlier steps can have changed since."""
        best, best_equal = None, -math.inf
        for branch in candidates:
            if branch.step >= self._step:
                continue
            difference = self.comparer.compare(branch.conditioning, conditioning, branch.dynamic)
            if difference.structural and not difference.equal and branch.position != len(self._called):
                continue
            score = difference.equal - len(difference.structural)
            if score > best_equal:
                best, best_equal = branch, score
        return best

    def _next_name(self) -> str:
        count = len(self.branches)
        return _ORDINALS[count] if count < len(_ORDINALS) else f"branch{count}"

    def _record(
        self, found: Branch | None, name: str, conditioning: Conditioning, position: int, timestep: Any
    ) -> Match:
        if found is None:
            branch = Branch(name, conditioning, position, self._step, timestep)
            self.branches.append(branch)
            self._called.append(branch)
            return Match(branch, True, Difference())
        difference = self.comparer.compare(found.conditioning, conditioning, found.dynamic)
        self._learn(found, difference)
        difference.changed |= self._jumps(found, conditioning)
        found.conditioning, found.position, found.step = conditioning, position, self._step
        found.timestep = timestep
        self._called.append(found)
        return Match(found, False, difference)

    def _jumps(self, branch: Branch, conditioning: Conditioning) -> set[str]:
        """Tensors computed from the latents that came or went, such as a control that was switched off."""
        if not branch.dynamic:
            return set()
        before, branch.strengths = branch.strengths, self.comparer.strengths(conditioning, branch.dynamic)
        both = before.keys() & branch.strengths.keys()
        return {name for name in both if _jumped(before[name], branch.strengths[name])}

    def _learn(self, branch: Branch, difference: Difference) -> None:
        """A tensor that changes in every step is computed from the latents or the timestep: not conditioning."""
        if branch.step >= self._step:
            return
        branch.streaks = {name: branch.streaks.get(name, 0) + 1 for name in difference.changed}
        branch.dynamic |= {name for name, count in branch.streaks.items() if count >= _DYNAMIC_AFTER}


def _jumped(before: float, after: float) -> bool:
    low, high = sorted((abs(before), abs(after)))
    return high > _JUMP * low


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
