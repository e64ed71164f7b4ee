"""What is remembered: of one branch, of one run, of one call in flight."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from cachekit.engine.branches import BranchBook
from cachekit.engine.clock import View
from cachekit.engine.history import History
from cachekit.engine.sites import SitePass
from cachekit.engine.stats import RunStats
from cachekit.engine.weights import WeightWatch


@dataclass
class BranchState:
    """What is remembered of one guidance branch during one run."""

    history: History
    consecutive: int = 0
    signature: Hashable = None
    weights: Hashable = None

    def forget(self) -> None:
        """Let go of all results of this branch."""
        self.history.clear()
        self.consecutive = 0


@dataclass(eq=False)
class RunState:
    """Everything that dies with a run."""

    stats: RunStats
    book: BranchBook = field(default_factory=BranchBook)
    branches: dict[str, BranchState] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    ended: bool = False
    _weighed: tuple[int, Hashable] = (-1, None)

    def weights(self, step: int, watch: WeightWatch) -> Hashable:
        """Fingerprint of the weights, taken once a step: users change them between steps."""
        if step != self._weighed[0]:
            self._weighed = step, watch.fingerprint()
        return self._weighed[1]

    def last_step(self) -> None:
        """The scheduler's last step: give back what no later call of this run can use."""
        self.book.last_step()
        for branch in self.book.branches:
            if branch.is_over and branch.name in self.branches:
                self.branches[branch.name].forget()

    def let_go(self) -> None:
        """Keep no tensor alive."""
        self.book.let_go()
        for state in self.branches.values():
            state.forget()

    def nbytes(self) -> int:
        """Bytes of all results held."""
        return sum(state.history.nbytes() for state in self.branches.values())


@dataclass
class Call:
    """One denoiser call in flight."""

    run: RunState
    view: View
    branch: str
    state: BranchState
    sources: tuple[torch.Tensor, ...]
    forced: str | None = None
    syncs: int = 0
    reused: bool = False
    reason: str = ""
    score: float | None = None
    site_pass: SitePass | None = None
    own_seconds: float = 0.0

    def read(self, tensor: torch.Tensor) -> float:
        """One number from the device."""
        self.syncs += 1
        return float(tensor)
