"""Which guidance branch a denoiser call belongs to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from cachekit.engine.conditioning import Comparer, Conditioning, Difference


@dataclass(eq=False)
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

    @property
    def awaited(self) -> list[str]:
        """Branches of the last step that have not been called in this one."""
        return [branch.name for branch in self.branches if branch.step == self._step - 1]

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
