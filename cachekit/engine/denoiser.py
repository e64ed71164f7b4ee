"""The engine of one denoiser: root hook -> clock -> sites ask their gate -> compute and keep, or predict -> record."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cachekit.engine import observers
from cachekit.engine.binding import bind, tensors_in
from cachekit.engine.clock import BareClock, View, calling_pipeline
from cachekit.engine.conditioning import BranchBook, Conditioning, Match
from cachekit.engine.discovery import latent_names, timestep_names, unwrap
from cachekit.engine.history import Entry, History
from cachekit.engine.hooks import Hook, Inner
from cachekit.engine.rules import CAP_REASON, GateContext, Rule
from cachekit.engine.session import WHOLE_COMPILE, Session, session_of
from cachekit.engine.sites import PassContext, Site, SitePass, StructureChangedError
from cachekit.engine.stats import CALIBRATION_REASON, Decision, DenoiserStats, RunStats
from cachekit.engine.weights import WeightWatch
from cachekit.errors import UnsupportedModelError, warn

FEW_STEPS = 8
_TELLING_STEPS = 4


@dataclass
class BranchState:
    """What is remembered of one guidance branch during one run."""

    history: History
    consecutive: int = 0
    signature: Hashable = None
    weights: Hashable = None

    def forget(self) -> None:
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
    weighed: tuple[int, Hashable] = (-1, None)

    def weights(self, step: int, watch: WeightWatch) -> Hashable:
        """Fingerprint of the weights, taken once a step: users change them between steps."""
        if step != self.weighed[0]:
            self.weighed = step, watch.fingerprint()
        return self.weighed[1]

    def let_go(self) -> None:
        """Keep no tensor alive."""
        self.book.let_go()
        for state in self.branches.values():
            state.forget()

    def nbytes(self) -> int:
        return sum(state.history.nbytes() for state in self.branches.values())


@dataclass
class Call:
    """One denoiser call in flight."""

    run: RunState
    view: View
    branch: str
    state: BranchState
    forced: str | None
    sources: tuple[torch.Tensor, ...]
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


class DenoiserEngine:
    """Caches one denoiser with one rule. All state lives here, keyed by thread, pipeline, run and branch.

    Args:
        name: component name, "" for a bare module.
        module: the denoiser; held weakly.
        label: what the statistics call the strategy.
        site: where to skip.
        strict: raise instead of warn when a computed call turns out to have nothing that can be skipped.
        progress: show reuse in the pipeline's progress bar.
        branches: names of the guidance branches in the order of their calls within a step; None to find out.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        label: str,
        site: Site,
        rule: Rule,
        strict: bool = False,
        progress: bool = True,
        branches: Sequence[str] | None = None,
    ) -> None:
        self.name, self.label, self.site, self.rule = name, label, site, rule
        self._strict, self._progress = strict, progress
        self._branch_names = tuple(branches) if branches else None
        self._module = weakref.ref(module)
        core = unwrap(module)
        self._core = weakref.ref(core)
        self._latents = latent_names(core)
        self._timesteps = timestep_names(core)
        self._excluded = frozenset((*self._latents, *self._timesteps, "return_dict"))
        self._watch = WeightWatch(core)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._local = threading.local()
        self._all_runs: weakref.WeakSet[RunState] = weakref.WeakSet()
        self._last: RunStats | None = None
        self._runs = self._total_calls = self._total_reused = 0
        self._lock = threading.Lock()
        self.roll_back: Callable[[], None] = self.remove
        self.removed = False
        self.notes: list[str] = []
        site.current = self._current_pass
        site.spend = self._spend
        self._root = Hook(module, self._handle, eager=True)
        observers.acquire(self)

    # life

    @property
    def hooked(self) -> nn.Module | None:
        """The module that was passed in; None once it is gone."""
        return self._module()

    @property
    def module(self) -> nn.Module | None:
        """The denoiser without a `torch.compile` wrapper; None once it is gone."""
        return self._core()

    def serves(self, module: Any) -> bool:
        """True when `module` is this engine's denoiser, wrapped by `torch.compile` or not."""
        return isinstance(module, nn.Module) and unwrap(module) is self.module

    def follow(self, pipeline: Any) -> None:
        """Take steps from the scheduler of `pipeline` when it is the one that runs."""
        session = session_of(pipeline)
        self._sessions.add(session)
        session.engines.add(self)

    def update(self, rule: Rule, label: str) -> None:
        """Use another rule on the same site from the next call on; what is held is let go."""
        self.rule, self.label = rule, label
        for run in list(self._all_runs):
            run.branches.clear()

    def free(self) -> None:
        """Let go of all results that are held."""
        for run in list(self._all_runs):
            run.let_go()

    def compiled(self, module: nn.Module) -> None:
        """`module.compile()` was called somewhere in the process; take the place in front of it again."""
        for hook in (self._root, *self.site.hooks):
            hook.ensure()
        if module is self.module:
            self.say(WHOLE_COMPILE)

    def say(self, text: str) -> None:
        """Something is wrong with this cache as such: warn once and keep it in the statistics."""
        if text not in self.notes:
            self.notes.append(text)
            warn(f"{self.label} on `{self.name or type(self.module).__name__}`: {text}")

    def remove(self) -> None:
        """Take off all hooks and let go of everything."""
        self.removed = True
        self.site.remove()
        self._root.remove()
        self.free()
        observers.release(self)
        for session in list(self._sessions):
            session.engines.discard(self)

    def stats(self) -> DenoiserStats:
        held = sum(run.nbytes() for run in list(self._all_runs))
        return DenoiserStats(
            self.name,
            self.label,
            self.site.describe(),
            self._last,
            self._runs,
            self._total_calls,
            self._total_reused,
            held,
            list(self.notes),
        )

    # one call

    def _current_pass(self) -> SitePass | None:
        call: Call | None = getattr(self._local, "call", None)
        if call is None:
            self._root.ensure()
            return None
        return call.site_pass

    def _spend(self, seconds: float) -> None:
        call: Call | None = getattr(self._local, "call", None)
        if call is not None:
            call.own_seconds += seconds

    def _handle(self, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(self._local, "call", None) is not None:
            return inner(*args, **kwargs)
        started = time.perf_counter()
        core = self._core()
        assert core is not None
        call = self._open(bind(type(core), args, kwargs))
        spent = 0.0

        def timed(*inner_args: Any, **inner_kwargs: Any) -> Any:
            nonlocal spent
            begin = time.perf_counter()
            try:
                return inner(*inner_args, **inner_kwargs)
            finally:
                spent += time.perf_counter() - begin

        try:
            output = self._forward(call, timed, args, kwargs)
        except BaseException:
            call.state.forget()
            call.run.ended = True
            self._thread().clock.abort()
            raise
        call.own_seconds += time.perf_counter() - started - spent
        self._close(call)
        return output

    def _forward(self, call: Call, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            output, entry = self._attempt(call, inner, args, kwargs)
        except StructureChangedError:
            call.forced = "the model ran other blocks or shapes than before"
            self._note(call.run, call.forced)
            call.state.forget()
            self.site.forget(call.branch)
            output, entry = self._attempt(call, inner, args, kwargs)
        self._keep(call, entry)
        return output

    def _attempt(
        self, call: Call, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Entry | None]:
        context = PassContext(
            step=call.view.step,
            history=call.state.history,
            predictor=self.rule.predictor,
            storage=self.rule.storage,
            decide=lambda signal: self._decide(call, signal),
            sources=call.sources,
            signature=call.state.signature,
        )
        call.site_pass = self.site.begin(call.branch, context)
        self._local.call = call
        try:
            with call.site_pass.surround():
                output = inner(*args, **kwargs)
            return output, call.site_pass.finish()
        finally:
            self._local.call = None
            call.site_pass = None

    def _keep(self, call: Call, entry: Entry | None) -> None:
        state = call.state
        if call.reused:
            state.consecutive += 1
            return
        state.consecutive = 0
        if entry is None:
            state.forget()
            self._nothing_kept(call)
            return
        previous = state.history.newest
        if self.rule.observe is not None and previous is not None:
            call.score = self.rule.observe(previous, entry, call.read)
        state.history.push(entry)

    def _nothing_kept(self, call: Call) -> None:
        text = (
            "a computed call could not be kept: its block calls differ from the last ones, write into their input, or "
            "no block stack carries the latents"
        )
        if self._strict:
            self.roll_back()
            raise UnsupportedModelError(
                f"{self.label}: {text}; disable_cache and register the block class, if it helps"
            )
        self._note(call.run, text)

    def _decide(self, call: Call, signal: torch.Tensor | None) -> bool:
        history = call.state.history
        if self.rule.observe is not None:
            call.reason = CALIBRATION_REASON
            return False
        objection = call.forced or self.rule.guards.objection(call.view, history, call.state.consecutive)
        call.reused, call.score = False, None
        if objection is None:
            context = GateContext(call.view, call.branch, history, signal, call.read)
            verdict = self.rule.gate.decide(context)
            call.score, call.reason = verdict.score, verdict.reason
            call.reused = verdict.reuse and verdict.is_sound
            if not verdict.is_sound:
                call.reason = "the score is not a finite number"
                self._note(call.run, call.reason)
        else:
            call.reason = objection
        if not call.reused:
            history.make_room()
        return call.reused

    # before and after

    def _open(self, arguments: dict[str, Any]) -> Call:
        conditioning = Conditioning.of(arguments, self._excluded)
        run, view, match = self._locate(arguments, conditioning)
        branch = match.branch.name
        state = run.branches.get(branch)
        if state is None:
            state = run.branches[branch] = BranchState(History(self.rule.predictor.depth))
        sources = tuple(t for name in self._latents for t in tensors_in(arguments.get(name)) if t.is_floating_point())
        call = Call(run, view, branch, state, None, sources, syncs=run.book.comparer.take())
        call.forced = _own_cache(arguments) or self._obstacle(run, view, state, sources, match)
        return call

    def _obstacle(
        self, run: RunState, view: View, state: BranchState, sources: Sequence[torch.Tensor], match: Match
    ) -> str | None:
        """Why nothing that was kept may be used in this call; forgets what no longer holds."""
        reason = None
        signature = tuple((tuple(t.shape), t.dtype, t.device) for t in sources)
        if signature != state.signature:
            reason = None if state.signature is None else "new shape, dtype or device"
        elif match.difference.reshaped or match.difference.structural:
            reason = "the conditioning has another form"
        elif match.difference.changed:
            reason = "the conditioning changed"
        weights = run.weights(view.step, self._watch)
        if weights != state.weights and state.weights is not None:
            reason = "the weights changed"
        state.signature, state.weights = signature, weights
        if getattr(self._core(), "_cache_config", None) is not None:
            reason = "diffusers' own cache was enabled on this model; call its disable_cache()"
        if torch.is_grad_enabled():
            reason = "gradients are enabled"
        if reason is not None:
            state.forget()
        return reason

    def _locate(self, arguments: dict[str, Any], conditioning: Conditioning) -> tuple[RunState, View, Match]:
        timestep = next((arguments[name] for name in self._timesteps if arguments.get(name) is not None), None)
        name = observers.context_name(self.module)
        found = self._scheduler_view(timestep)
        if found is not None:
            session, view = found
            run = self._run(session, view)
            run.book.begin_step(view.step)
            if not self._stands_still(run, conditioning, name, timestep):
                return run, view, run.book.match(conditioning, self._named(run, name), timestep)
            session.clock.stuck = True
            self._lead_by_timestep(session, run)
        return self._bare_view(conditioning, name, timestep)

    def _scheduler_view(self, timestep: Any) -> tuple[Session, View] | None:
        tensor = timestep if isinstance(timestep, torch.Tensor) else None
        pipeline = calling_pipeline()
        if pipeline is not None:
            self.follow(pipeline)
            session = session_of(pipeline)
            view = session.clock.read(session.scheduler, tensor, getattr(pipeline, "_current_timestep", None))
            return None if view is None else (session, view)
        for session in list(self._sessions):
            # A loop of the user's own: the scheduler counts when its current entry is what the denoiser was given.
            view = None if session.scheduler is None else session.clock.read(session.scheduler, tensor, None)
            if view is not None and view.timestep is not None and tensor is not None:
                value = float(tensor.float().max())
                self._thread().syncs += 1
                if any(abs(value - view.timestep / scale) <= 1e-3 * max(abs(value), 1e-6) for scale in (1, 1000)):
                    return session, view
        return None

    def _bare_view(self, conditioning: Conditioning, name: str | None, timestep: Any) -> tuple[RunState, View, Match]:
        thread = self._thread()
        value = _number(timestep)
        thread.syncs += isinstance(timestep, torch.Tensor)
        known = thread.runs.get(None)
        branch = None if known is None else known.book.peek(conditioning, name)
        view = thread.clock.read(value, branch)
        run = self._run(None, view)
        run.book.begin_step(view.step)
        match = run.book.match(conditioning, self._named(run, name), timestep)
        thread.clock.saw(match.branch.name)
        return run, view, match

    def _lead_by_timestep(self, session: Session, run: RunState) -> None:
        """From now on this run is followed by the value of its timestep; so far it had one step."""
        thread = self._thread()
        value = _number(run.book.first_timestep)
        thread.syncs += 1
        run.stats.run = thread.clock.take_over(value, {branch.name for branch in run.book.branches})
        run.stats.source, run.stats.steps = "timestep", None
        thread.runs[None] = thread.runs.pop(session)

    def _named(self, run: RunState, name: str | None) -> str | None:
        if name is None and self._branch_names is not None:
            return self._branch_names[run.book.called % len(self._branch_names)]
        return name

    def _stands_still(self, run: RunState, conditioning: Conditioning, name: str | None, timestep: Any) -> bool:
        """True when a branch is called again in the "same" step with another timestep: nobody steps the scheduler."""
        earlier = run.book.earlier_timestep(conditioning, name)
        if not isinstance(earlier, torch.Tensor) or not isinstance(timestep, torch.Tensor) or earlier is timestep:
            return False
        self._thread().syncs += 1
        return earlier.shape != timestep.shape or not torch.equal(earlier, timestep)

    def _thread(self) -> _ThreadState:
        state: _ThreadState | None = getattr(self._local, "state", None)
        if state is None:
            state = self._local.state = _ThreadState()
        return state

    def _run(self, session: Session | None, view: View) -> RunState:
        runs = self._thread().runs
        run = runs.get(session)
        if run is None or run.stats.run != view.run or run.stats.source != view.source:
            if run is not None:
                run.branches.clear()
                if len(run.stats.computed_steps()) >= _TELLING_STEPS:
                    self._end_of_run(run)
            for dead in [key for key in runs if key is not None and key.pipeline is None]:
                del runs[dead]
            for hook in self.site.hooks:
                hook.ensure()
            run = runs[session] = RunState(RunStats(view.run, view.steps, view.source))
            self._all_runs.add(run)
            with self._lock:
                self._runs += 1
                self._last = run.stats
        return run

    def _close(self, call: Call) -> None:
        run, thread = call.run, self._thread()
        call.syncs += thread.syncs + run.book.comparer.take()
        thread.syncs = 0
        stats = run.stats
        stats.decisions.append(Decision(call.view.step, call.branch, call.reused, call.reason, call.score, call.syncs))
        stats.overhead_seconds += call.own_seconds
        stats.peak_bytes = max(stats.peak_bytes, run.nbytes())
        with self._lock:
            self._last = stats
            self._total_calls += 1
            self._total_reused += call.reused
        if call.view.is_last:
            self._last_step(call)
        if self._progress:
            session = next((s for s, r in thread.runs.items() if r is run), None)
            if session is not None:
                session.show(f"reused {stats.reused}/{stats.calls}")

    def _last_step(self, call: Call) -> None:
        """Give back what no later call of this run can use."""
        call.run.book.last_step()
        for branch in call.run.book.branches:
            if not branch.conditioning.leaves:
                call.run.branches[branch.name].forget()
        for session, run in list(self._thread().runs.items()):
            if run is call.run and session is not None:
                for engine in list(session.engines):
                    if engine is not self:
                        engine.leave(session, call.view.step)
        self._end_of_run(call.run)

    def _end_of_run(self, run: RunState) -> None:
        """What has to be said about a whole run."""
        if run.ended:
            return
        run.ended = True
        decisions = run.stats.decisions
        asked = [d for d in decisions if d.score is not None or d.reason == CAP_REASON]
        if not run.stats.reused and self.rule.observe is None:
            few = (
                f" With {run.stats.steps} steps there is little to reuse." if (run.stats.steps or 0) < FEW_STEPS else ""
            )
            reasons = sorted({d.reason for d in decisions})
            self._note(run, f"enabled, but nothing was reused in the whole run ({'; '.join(reasons)}).{few}")
        elif asked and all(d.reused or d.reason == CAP_REASON for d in asked) and any(not d.reused for d in asked):
            self._note(run, "the gate never asked for a computation, only the cap on consecutive reuses did")

    def leave(self, session: Session, step: int) -> None:
        """Another denoiser of the pipeline is in the last step; give back what no later call will use."""
        run = self._thread().runs.get(session)
        if run is not None and all(decision.step < step for decision in run.stats.decisions[-1:]):
            run.let_go()
            self._end_of_run(run)

    def _note(self, run: RunState, text: str) -> None:
        if text not in run.warned:
            run.warned.add(text)
            run.stats.notes.append(text)
            warn(f"{self.label} on `{self.name or type(self.module).__name__}`: {text}")


def _number(timestep: Any) -> float | None:
    """A timestep as one number; per-token timesteps by their maximum."""
    if isinstance(timestep, torch.Tensor):
        return float(timestep.float().max())
    return float(timestep) if isinstance(timestep, (int, float)) else None


def _own_cache(arguments: dict[str, Any]) -> str | None:
    """An objection when this call writes a key/value cache that the model keeps itself; such a call must run."""
    caches = {name: value for name, value in arguments.items() if name.startswith("kv_cache") and value is not None}
    modes = [value if isinstance(value, str) else getattr(value, "mode", None) for value in caches.values()]
    fills = [value.get("is_cache_step") for value in caches.values() if isinstance(value, Mapping)]
    if not caches or any(mode in _READING for mode in modes) or False in fills:
        return None
    return "the call fills the model's own key/value cache"


_READING = ("cached", "read", "inject")


class _ThreadState:
    """Clocks and runs of one thread."""

    def __init__(self) -> None:
        self.clock = BareClock()
        self.runs: dict[Session | None, RunState] = {}
        self.syncs = 0
