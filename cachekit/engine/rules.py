"""The parts a strategy is made of: a site, a gate, a predictor and guards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from cachekit.engine.clock import View
from cachekit.engine.history import AS_COMPUTED, Entry, History, Storage


@dataclass(frozen=True)
class GateContext:
    """All that a gate may look at.

    Attributes:
        now: where the run is.
        branch: name of the guidance branch.
        history: computed calls of this site and branch.
        signal: the probe's residual of this call (sites with a probe), else None.
        read: reads one number back from the device; counted in the statistics.
        fetch: reads all numbers of a tensor back at once, nested as the tensor is; counted as one.
        arguments: arguments of the denoiser call by name.
        carry: what the gate handed over in the last call of this branch; None when what was kept has been let go.
        refreshes: True when a rule further out computes in this call what it predicts later calls from.
    """

    now: View
    branch: str
    history: History
    signal: torch.Tensor | None
    read: Callable[[torch.Tensor], float]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    carry: Any = None
    fetch: Callable[[torch.Tensor], Any] = torch.Tensor.tolist
    refreshes: bool = False


@dataclass(frozen=True)
class Verdict:
    """A gate's answer. A score that is not a finite number always means compute.

    `carry` reaches the gate again in the next call of this branch (tensors in it count as bytes held). `note` says that
    the gate lacks something: it is warned of once a run and stands in the statistics. `refreshes` says of a computation
    that later calls are predicted from it, so that rules further in had better compute as well.
    """

    reuse: bool
    score: float | None = None
    reason: str = ""
    carry: Any = None
    note: str = ""
    refreshes: bool = False

    @property
    def is_sound(self) -> bool:
        return self.score is None or math.isfinite(self.score)


class Gate(Protocol):
    """Decides at a site whether a call is computed or reused. Pure: keeps no state between calls."""

    def decide(self, context: GateContext) -> Verdict: ...


@runtime_checkable
class AttentiveGate(Protocol):
    """A gate that has to see every call: `attend` is asked where guards object, and returns what to carry on."""

    def attend(self, context: GateContext) -> Any: ...


@runtime_checkable
class PlannedGate(Protocol):
    """A gate whose decisions are known before the run; `computes` says of any step what `decide` will say of it.

    None where this branch or number of steps leaves it open. `steps` is None on a bare denoiser.
    """

    def computes(self, branch: str, step: int, steps: int | None) -> bool | None: ...


@dataclass(frozen=True)
class Measure:
    """A score still on the device, and what turns the number that is read back into a verdict.

    Attributes:
        score: a tensor of one value; None when there is nothing to compare, `judge` then gets None.
        judge: gives the verdict.
    """

    score: torch.Tensor | None
    judge: Callable[[float | None], Verdict]

    def verdict(self, context: GateContext) -> Verdict:
        """Read the score back and judge it."""
        return self.judge(None if self.score is None else context.read(self.score))


@runtime_checkable
class ScoredGate(Gate, Protocol):
    """A gate whose scores for all samples of a batch can be read back from the device together."""

    def measure(self, context: GateContext) -> Measure: ...


class Predictor(Protocol):
    """Says what a skipped site would have returned. Pure: keeps no state between calls."""

    @property
    def depth(self) -> int:
        """Number of computed results that are kept for it."""
        ...

    def predict(self, steps: Sequence[int], values: Sequence[torch.Tensor], now: View) -> torch.Tensor:
        """Prediction for the step `now` from results at `steps` (newest first, at least one)."""
        ...


@runtime_checkable
class PlacedPredictor(Protocol):
    """A predictor that has to know the place; sites ask `predict_at` then instead of `predict`."""

    def predict_at(
        self, place: Any, steps: Sequence[int], values: Sequence[torch.Tensor], now: View
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Guards:
    """Conditions under which the gate is not asked and the call computes.

    Attributes:
        warmup: the first `warmup` steps compute.
        retention: this fraction of the steps computes at the start.
        assumed: number of steps that `retention` refers to when no scheduler tells.
        stop: from this step on everything computes; None for never.
        ending: the last `ending` steps compute, where a scheduler tells how many there are.
        max_consecutive: at most so many reuses in a row; None for no limit.
    """

    warmup: int = 1
    retention: float = 0.0
    assumed: int = 0
    stop: int | None = None
    max_consecutive: int | None = None
    ending: int = 0

    def objection(self, now: View, history: History, consecutive: int) -> str | None:
        """Why this call must compute, or None."""
        if not len(history):
            return "nothing to reuse yet"
        listed = self.listed(now.step, now.steps)
        if listed is not None:
            return listed
        if self.max_consecutive is not None and consecutive >= self.max_consecutive:
            return CAP_REASON
        return None

    def listed(self, step: int, steps: int | None) -> str | None:
        """Why a step must compute whatever happens in the run, or None."""
        if step < max(self.warmup, round(self.retention * (steps or self.assumed))):
            return "warm-up"
        if self.stop is not None and step >= self.stop:
            return "after the last cached step"
        if self.ending and steps is not None and step >= steps - self.ending:
            return "one of the last steps"
        return None


CAP_REASON = "cap on consecutive reuses"


@dataclass(frozen=True)
class StackSpec:
    """Site: the block stacks; of a UNet the part below its `depth` outermost blocks.

    With `probe` the first block always runs and its residual is the gate's signal.
    """

    place: ClassVar[str] = "the blocks"
    probe: bool = False
    depth: int = 1


@dataclass(frozen=True)
class ModulesSpec:
    """Site: the outputs of single modules.

    Attributes:
        modules: paths of the modules whose output is predicted.
        zeroed: paths of modules that return zeros on reuse (their output does not matter then).
    """

    place: ClassVar[str] = "modules inside the blocks"
    modules: tuple[str, ...]
    zeroed: tuple[str, ...] = ()


@dataclass(frozen=True)
class GuidanceSpec:
    """Site: the branch of a guidance pair that is called second, or the unconditional half of a doubled batch."""

    place: ClassVar[str] = "the unconditional branch"


@dataclass(frozen=True)
class DenoiserSpec:
    """Site: the whole denoiser. Nothing is looked for or hooked inside."""

    place: ClassVar[str] = "the whole denoiser"


@dataclass(frozen=True)
class TextSpec:
    """Site: projections of the text stream that do not depend on the step, found by tracing a call."""

    place: ClassVar[str] = "the text projections"


Spec = StackSpec | ModulesSpec | GuidanceSpec | DenoiserSpec | TextSpec


@dataclass(frozen=True)
class Rule:
    """A strategy, or one of the rules that it consists of, taken apart.

    `name` says which part it is where a strategy has several, such as "spatial attention".
    `observe` looks at two computed calls in a row (previous, new) and returns a number for the decision record; it is
    how calibration listens.
    `per_sample` lets the samples of a batch decide separately where the site can split it; needs a `ScoredGate`.
    """

    site: Spec
    gate: Gate
    predictor: Predictor
    guards: Guards = field(default_factory=Guards)
    storage: Storage = AS_COMPUTED
    observe: Callable[[Entry, Entry, Callable[[torch.Tensor], float]], float] | None = None
    name: str = ""
    per_sample: bool = False

    def computes(self, branch: str, step: int, steps: int | None) -> bool | None:
        """Whether a step will be computed, as far as that is known before the run; None where it is open."""
        if self.observe is not None or self.guards.listed(step, steps) is not None:
            return True
        return self.gate.computes(branch, step, steps) if isinstance(self.gate, PlannedGate) else None
