"""What is remembered: of one rule in one branch, of one run, of one call in flight."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cachekit.engine.binding import tensors_in
from cachekit.engine.branches import BranchBook
from cachekit.engine.clock import View
from cachekit.engine.conditioning import Conditioning
from cachekit.engine.control import ControlState
from cachekit.engine.halves import CallFacts
from cachekit.engine.history import Entry, History
from cachekit.engine.member import Member, Part
from cachekit.engine.sites import Saving, SitePass
from cachekit.engine.stats import RunStats
from cachekit.engine.weights import WeightWatch


@dataclass
class BranchState:
    """What one rule remembers of one guidance branch, or of one sample in it, during one run."""

    history: History
    consecutive: int = 0
    carry: Any = None
    samples: list[BranchState] = field(default_factory=list)

    def hold(self, samples: int) -> None:
        """Remember so many samples separately; 0 for all of them together. What was held in another way is let go."""
        if len(self.samples) != samples:
            self.forget()
            self.samples = [BranchState(History(self.history.depth)) for _ in range(samples)]

    def forget(self) -> None:
        """Let go of all results of this branch."""
        self.history.clear()
        self.consecutive, self.carry = 0, None
        for sample in self.samples:
            sample.forget()

    def nbytes(self) -> int:
        """Bytes of the results held."""
        carried = () if self.carry is None else tensors_in(self.carry)
        held = self.history.nbytes() + sum(tensor.nbytes for tensor in carried)
        return held + sum(sample.nbytes() for sample in self.samples)


@dataclass(frozen=True)
class Facts:
    """The circumstances of a call: the form of the latents, the weights, the control; None where unknown."""

    signature: Hashable = None
    weights: Hashable = None
    control: ControlState | None = None


@dataclass(eq=False)
class RunState:
    """Everything that dies with a run."""

    number: int
    steps: int | None
    source: str
    book: BranchBook = field(default_factory=BranchBook)
    stats: dict[Member, RunStats] = field(default_factory=dict)
    calls: int = 0
    _states: dict[tuple[Part, str], BranchState] = field(default_factory=dict)
    _facts: dict[str, Facts] = field(default_factory=dict)
    _weighed: tuple[int, Hashable] = (-1, None)
    _written: tuple[int, int] = (-1, 0)
    _writes: dict[str, int] = field(default_factory=dict)

    def stats_of(self, member: Member) -> RunStats:
        """The record of one strategy in this run."""
        if member not in self.stats:
            self.stats[member] = RunStats(self.number, self.steps, self.source)
        return self.stats[member]

    def state_of(self, part: Part, branch: str) -> BranchState:
        """What a rule remembers of a branch."""
        state = self._states.get((part, branch))
        if state is None:
            state = self._states[part, branch] = BranchState(History(part.rule.predictor.depth))
        return state

    def newest_of(self, part: Part, other_than: str) -> Mapping[str, Entry]:
        """Other branch -> what a rule kept of its newest computed call."""
        found = {name: state.history.newest for (owner, name), state in self._states.items() if owner is part}
        return {name: entry for name, entry in found.items() if entry is not None and name != other_than}

    def follow_timestep(self, number: int) -> None:
        """From now on the steps of this run are told by timestep values."""
        self.number, self.steps, self.source = number, None, "timestep"
        for stats in self.stats.values():
            stats.run, stats.steps, stats.source = number, None, "timestep"

    def exchange(self, branch: str, facts: Facts) -> Facts:
        """Note the circumstances of a branch's call; returns those of its last one."""
        before = self._facts.get(branch, Facts())
        self._facts[branch] = facts
        return before

    def weights(self, step: int, watch: WeightWatch) -> Hashable:
        """Set-up of the weights, taken once a step: users change them between steps."""
        if step != self._weighed[0]:
            self._weighed = step, watch.setup()
        return self._weighed[1]

    def weigh(self, branch: str, step: int, watch: WeightWatch) -> None:
        """Note how often weights were written into, before the first of the results that a branch holds."""
        if branch not in self._writes:
            self._writes[branch] = self._count(step, watch)

    def written(self, branch: str, step: int, watch: WeightWatch) -> bool:
        """True when weights were written into since `weigh` took note for a branch.

        Asked before a reuse, not at computed steps: the count only grows, so equal counts mean that nothing was
        written while the results were computed either.
        """
        return self._writes.get(branch) != self._count(step, watch)

    def _count(self, step: int, watch: WeightWatch) -> int:
        if step != self._written[0]:
            self._written = step, watch.writes()
        return self._written[1]

    def forget(self, branch: str) -> None:
        """Let go of all results of a branch."""
        self._writes.pop(branch, None)
        for (_, name), state in self._states.items():
            if name == branch:
                state.forget()

    def forget_part(self, part: Part) -> None:
        """Let go of all that a rule remembers."""
        for key in [key for key in self._states if key[0] is part]:
            del self._states[key]

    def last_step(self) -> None:
        """The scheduler's last step: give back what no later call of this run can use."""
        self.book.last_step()
        over = {branch.name for branch in self.book.branches if branch.is_over}
        all_over = len(over) == len(self.book.branches)
        for (part, name), state in self._states.items():
            if name in over and (all_over or not part.site.joins_branches):
                state.forget()

    def let_go(self) -> None:
        """Keep no tensor alive."""
        self.book.let_go()
        for state in self._states.values():
            state.forget()

    def clear(self) -> None:
        """Another run takes the place of this one."""
        self._states.clear()

    def nbytes(self, member: Member) -> int:
        """Bytes of all results held for one strategy."""
        return sum(state.nbytes() for (part, _), state in self._states.items() if part.member is member)


@dataclass
class PartCall:
    """What one rule does in one denoiser call, as a whole and for each sample that decides for itself."""

    part: Part
    state: BranchState
    syncs: int = 0
    reused: bool = False
    reason: str = ""
    score: float | None = None
    site_pass: SitePass | None = None
    samples: tuple[PartCall, ...] = ()
    saving: Saving = field(default_factory=Saving)
    nothing_kept: str = ""

    def finish(self) -> Entry | None:
        """End the pass; what it found is kept, it itself is not."""
        assert self.site_pass is not None
        entry = self.site_pass.finish()
        self.saving, self.nothing_kept = self.site_pass.saving, self.site_pass.nothing_kept
        return entry

    def read_all(self, tensors: Sequence[torch.Tensor | None]) -> list[float | None]:
        """One number of each tensor, all read from the device together."""
        present = [tensor for tensor in tensors if tensor is not None]
        self.syncs += bool(present)
        numbers = iter(torch.stack(present).tolist() if present else ())
        return [None if tensor is None else next(numbers) for tensor in tensors]

    def read(self, tensor: torch.Tensor) -> float:
        """One number from the device."""
        self.syncs += 1
        return float(tensor.detach())

    def fetch(self, tensor: torch.Tensor) -> Any:
        """All numbers of a tensor from the device."""
        self.syncs += 1
        return tensor.tolist()


@dataclass
class Call:
    """One denoiser call in flight. `altered` says that modules are run on other arguments than the call was given."""

    run: RunState
    view: View
    branch: str
    arguments: dict[str, Any]
    sources: tuple[torch.Tensor, ...]
    signature: Hashable
    conditioning: Conditioning
    forced: str | None = None
    altered: bool = False
    parts: dict[Part, PartCall] = field(default_factory=dict)
    own_seconds: float = 0.0
    facts: CallFacts = field(default_factory=CallFacts)

    def undisturbed_for(self, item: PartCall) -> bool:
        """True when the model ran on the call's arguments and no other rule skipped anything."""
        return not self.altered and not any(other.reused for other in self.parts.values() if other is not item)

    def of(self, member: Member) -> Iterator[PartCall]:
        """What the rules of one strategy do in this call."""
        return (item for item in self.parts.values() if item.part.member is member)
