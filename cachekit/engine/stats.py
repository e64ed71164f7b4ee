"""One record per decision, and what they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Decision:
    """What one rule of a strategy decided in one denoiser call.

    Attributes:
        step: position in the executed schedule, from 0.
        branch: guidance branch.
        reused: False when everything was computed.
        reason: why.
        score: what the gate compared with its threshold, if it was asked.
        syncs: values read back from the device for this decision.
        call: counts the denoiser calls of the run from 0.
        part: which rule, where a strategy has several.
        projections: projections that were not computed, where a site counts them.
        flops_saved: their floating-point operations.
        reused_samples: for each sample of the batch whether it was reused, where they decide separately; `reused` is
            then True when all were.
        scores: what was compared for each of them.
        bytes_moved: bytes of the denoiser's weights that offloading moved or read in this call, or began to; of
            several strategies on a denoiser it stands with the first.
    """

    step: int
    branch: str
    reused: bool
    reason: str
    score: float | None = None
    syncs: int = 0
    call: int = 0
    part: str = ""
    projections: int = 0
    flops_saved: int = 0
    reused_samples: tuple[bool, ...] = ()
    scores: tuple[float | None, ...] = ()
    bytes_moved: int = 0

    @property
    def sign(self) -> str:
        """How a decision is drawn: # computed, . reused, + computed for some samples."""
        return "." if self.reused else "+" if any(self.reused_samples) else "#"


@dataclass
class RunStats:
    """All decisions of one run of one strategy on one denoiser.

    Attributes:
        steps: number of scheduler steps; None on a bare denoiser.
        source: "scheduler" or "timestep", whichever told the steps.
        peak_bytes: most bytes held between two calls.
        overhead_seconds: time spent in cachekit's own code, without the model's; with several strategies on a denoiser
            it stands with the first.
        ended: True once the run is over.
    """

    run: int
    steps: int | None
    source: str
    decisions: list[Decision] = field(default_factory=list)
    peak_bytes: int = 0
    overhead_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    ended: bool = False

    @property
    def calls(self) -> int:
        """Denoiser calls in which this strategy had something to decide."""
        return len({decision.call for decision in self.decisions})

    @property
    def reused(self) -> int:
        """Calls that were reused; where samples decide separately, by all of them."""
        return len({decision.call for decision in self.decisions if decision.reused})

    @property
    def computed(self) -> int:
        return self.calls - self.reused

    @property
    def samples(self) -> int:
        """Samples in all decisions that were made for each of them."""
        return sum(len(decision.reused_samples) for decision in self.decisions)

    @property
    def computed_samples(self) -> int:
        """Those of `samples` that were computed."""
        return self.samples - sum(sum(decision.reused_samples) for decision in self.decisions)

    @property
    def host_syncs(self) -> int:
        return sum(decision.syncs for decision in self.decisions)

    @property
    def flops_saved(self) -> int:
        """Floating-point operations that were skipped, where a site counts them."""
        return sum(decision.flops_saved for decision in self.decisions)

    @property
    def projections_reused(self) -> int:
        """Calls of projections that were skipped, where a site counts them."""
        return sum(decision.projections for decision in self.decisions)

    @property
    def bytes_moved(self) -> int:
        """Bytes of weights that offloading moved in this run."""
        return sum(decision.bytes_moved for decision in self.decisions)

    @property
    def bytes_moved_per_step(self) -> dict[int, int]:
        """Step -> bytes of weights that offloading moved in it, or began to move for what runs next."""
        moved: dict[int, int] = {}
        for decision in self.decisions:
            moved[decision.step] = moved.get(decision.step, 0) + decision.bytes_moved
        return moved

    @property
    def branches(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(decision.branch for decision in self.decisions))

    def of(self, branch: str) -> list[Decision]:
        """Decisions of one branch in order."""
        return [decision for decision in self.decisions if decision.branch == branch]

    def computed_steps(self, branch: str | None = None) -> tuple[int, ...]:
        """Steps that were computed, of one branch or of the first one."""
        if not self.decisions:
            return ()
        decisions = self.of(branch or self.branches[0])
        reused = {decision.call for decision in decisions if decision.reused}
        return tuple(dict.fromkeys(decision.step for decision in decisions if decision.call not in reused))


@dataclass
class DenoiserStats:
    """What one strategy did on one denoiser: the last run, and totals since it was enabled.

    Attributes:
        name: component name; "" for a bare module.
        strategy: registered name of the strategy.
        settings: its config, as text.
        site: what is hooked.
        last: the current or last run; None before the first call.
        runs: number of runs so far.
        bytes_held: bytes held right now.
        notes: what is wrong with this cache as such, such as a denoiser that was replaced.
        ranks: number of processes that share the denoiser's calls and decide together.
    """

    name: str
    strategy: str
    settings: str
    site: str
    last: RunStats | None
    runs: int
    total_calls: int
    total_reused: int
    bytes_held: int
    notes: list[str] = field(default_factory=list)
    ranks: int = 1


class Stats:
    """Statistics of the enabled caches. `str()` is a table, `to_dict()` is JSON-ready.

    The sums count the first strategy of each denoiser, except for bytes, which are summed over all; a strategy that
    changes no bit comes after one that skips steps.

    Attributes:
        all: every strategy on every denoiser.
        denoisers: component name -> the first strategy on it.
    """

    def __init__(self, found: Iterable[DenoiserStats]) -> None:
        self.all = tuple(found)
        self.denoisers: dict[str, DenoiserStats] = {}
        for item in self.all:
            self.denoisers.setdefault(item.name, item)

    def of(self, strategy: str) -> dict[str, DenoiserStats]:
        """Component name -> statistics of one strategy."""
        return {item.name: item for item in self.all if item.strategy == strategy}

    def _last(self) -> list[RunStats]:
        return [item.last for item in self.denoisers.values() if item.last is not None]

    @property
    def last(self) -> RunStats | None:
        """The last run of the first denoiser that has one."""
        return next(iter(self._last()), None)

    @property
    def calls(self) -> int:
        """Denoiser calls of the last run, over all denoisers."""
        return sum(run.calls for run in self._last())

    @property
    def computed(self) -> int:
        return sum(run.computed for run in self._last())

    @property
    def reused(self) -> int:
        return sum(run.reused for run in self._last())

    @property
    def bytes_held(self) -> int:
        """Bytes held right now."""
        return sum(item.bytes_held for item in self.all)

    @property
    def peak_bytes(self) -> int:
        """Most bytes held between two calls of the last run."""
        return sum(item.last.peak_bytes for item in self.all if item.last is not None)

    @property
    def host_syncs(self) -> int:
        return sum(run.host_syncs for run in self._last())

    @property
    def bytes_moved(self) -> int:
        """Bytes of weights that offloading moved in the last run, over all denoisers."""
        return sum(run.bytes_moved for run in self._last())

    @property
    def overhead_seconds(self) -> float:
        return sum(run.overhead_seconds for run in self._last())

    @property
    def magnitude_ratios(self) -> dict[str, list[float]]:
        """Branch -> ratio of each step, measured by a run with `MagCacheConfig(calibrate=True)`.

        With several denoisers in turn (Wan 2.2) the steps of a branch are joined in order.
        """
        pairs: dict[str, dict[int, float]] = {}
        for run in self._last():
            for decision in run.decisions:
                if decision.reason == CALIBRATION_REASON:
                    score = 1.0 if decision.score is None else decision.score
                    pairs.setdefault(decision.branch, {})[decision.step] = score
        return {branch: [steps[step] for step in sorted(steps)] for branch, steps in pairs.items()}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in self.denoisers}
        for item in self.all:
            found[item.name].append(asdict(item))
        return {"denoisers": found}

    def __repr__(self) -> str:
        return f"<Stats: {self.computed} of {self.calls} calls computed>"

    def __str__(self) -> str:
        return "\n".join(_describe(item) for item in self.all) or "no cache enabled"


CALIBRATION_REASON = "calibration"


def _describe(item: DenoiserStats) -> str:
    title = f"{item.name or 'denoiser'}: {item.settings} on {item.site}"
    if item.ranks > 1:
        title += f", decided by {item.ranks} ranks together"
    run = item.last
    notes = [f"  note: {note}" for note in item.notes]
    if run is None:
        return "\n".join([title, "  not called yet", *notes])
    of_steps = "" if run.steps is None else f" of {run.steps} steps"
    lines = [
        f"{title}\n  run {item.runs}{of_steps}: {run.calls} calls, {run.computed} computed, {run.reused} reused, "
        f"{format_bytes(item.bytes_held)} held (peak {format_bytes(run.peak_bytes)}), {run.host_syncs} host syncs, "
        f"own time {run.overhead_seconds * 1e3:.1f} ms"
    ]
    if run.projections_reused:
        lines.append(f"  {run.projections_reused} projections not computed, {run.flops_saved / 1e9:.3g} GFLOP saved")
    if run.bytes_moved:
        still = sum(not moved for moved in run.bytes_moved_per_step.values())
        lines.append(f"  {format_bytes(run.bytes_moved)} of weights moved; none in {still} steps")
    for branch in run.branches:
        for part in dict.fromkeys(decision.part for decision in run.of(branch)):
            strip = "".join(decision.sign for decision in run.of(branch) if decision.part == part)
            legend = f"# computed, . reused{', + some samples computed' * ('+' in strip)}{', ' * bool(part)}{part}"
            lines.append(f"  {branch:<10} {strip}   ({legend})")
    if run.samples:
        lines.append(f"  samples    {run.computed_samples} of {run.samples} computed, each by its own decision")
    reasons: dict[tuple[bool, str], int] = {}
    for decision in run.decisions:
        reason = f"{decision.part}: {decision.reason}" if decision.part else decision.reason
        key = decision.reused, reason
        reasons[key] = reasons.get(key, 0) + 1
    for (reused, reason), count in sorted(reasons.items(), key=lambda pair: -pair[1]):
        lines.append(f"  {count:>4} x {'reused' if reused else 'computed'}: {reason}")
    lines.extend(f"  note: {note}" for note in run.notes)
    return "\n".join([*lines, *notes])


def format_bytes(count: float) -> str:
    """Bytes in a readable unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
