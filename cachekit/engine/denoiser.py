"""The engine of one denoiser: root hook -> clock -> sites ask their gate -> compute and keep, or predict -> record."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from cachekit.engine import observers
from cachekit.engine.binding import bind, tensors_in
from cachekit.engine.branches import Match
from cachekit.engine.discovery import unwrap
from cachekit.engine.history import Entry, History
from cachekit.engine.hooks import Hook, Inner
from cachekit.engine.own_cache import fills_own_cache
from cachekit.engine.rules import CAP_REASON, GateContext, Rule
from cachekit.engine.session import WHOLE_COMPILE, Session, session_of
from cachekit.engine.sites import PassContext, Site, SitePass, StructureChangedError
from cachekit.engine.state import BranchState, Call, RunState
from cachekit.engine.stats import CALIBRATION_REASON, Decision, DenoiserStats, RunStats
from cachekit.engine.tracker import Tracker
from cachekit.engine.weights import WeightWatch
from cachekit.errors import UnsupportedModelError, warn

FEW_STEPS = 8
_TELLING_STEPS = 4


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
        self._module = weakref.ref(module)
        core = unwrap(module)
        self._core = weakref.ref(core)
        self._watch = WeightWatch(core)
        self._tracker = Tracker(core, branches, self._new_run)
        self._local = threading.local()
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
        self._tracker.sessions.add(session)
        session.engines.add(self)

    def update(self, rule: Rule, label: str) -> None:
        """Use another rule on the same site from the next call on; what is held is let go."""
        self.rule, self.label = rule, label
        for run in list(self._tracker.runs):
            run.branches.clear()

    def free(self) -> None:
        """Let go of all results that are held."""
        for run in list(self._tracker.runs):
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
        for session in list(self._tracker.sessions):
            session.engines.discard(self)

    def stats(self) -> DenoiserStats:
        held = sum(run.nbytes() for run in list(self._tracker.runs))
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
            self._tracker.abort()
            raise
        self._close(call)
        call.run.stats.overhead_seconds += call.own_seconds + time.perf_counter() - started - spent
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
            read=call.read,
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
        run, view, match = self._tracker.locate(arguments)
        if self._last is not run.stats:
            self._last = run.stats
            self._follow_run(run)
        branch = match.branch.name
        state = run.branches.get(branch)
        if state is None:
            state = run.branches[branch] = BranchState(History(self.rule.predictor.depth))
        tensors = (tensor for name in self._tracker.latents for tensor in tensors_in(arguments.get(name)))
        call = Call(run, view, branch, state, tuple(tensor for tensor in tensors if tensor.is_floating_point()))
        call.forced = self._obstacle(call, arguments, match)
        return call

    def _follow_run(self, run: RunState) -> None:
        session = self._tracker.session_of(run)
        if session is not None:
            session.engines.add(self)

    def _obstacle(self, call: Call, arguments: dict[str, Any], match: Match) -> str | None:
        """Why nothing that was kept may be used in this call; forgets what no longer holds."""
        state, difference, reason = call.state, match.difference, None
        signature = tuple((tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in call.sources)
        if signature != state.signature:
            reason = None if state.signature is None else "new shape, dtype or device"
        elif difference.reshaped or difference.structural:
            reason = "the conditioning has another form"
        elif difference.changed:
            reason = "the conditioning changed"
        weights = call.run.weights(call.view.step, self._watch)
        if weights != state.weights and state.weights is not None:
            reason = "the weights changed"
        state.signature, state.weights = signature, weights
        if getattr(self._core(), "_cache_config", None) is not None:
            reason = "diffusers' own cache was enabled on this model; call its disable_cache()"
        if fills_own_cache(arguments):
            reason = "the call fills the model's own key/value cache"
        if torch.is_grad_enabled():
            reason = "gradients are enabled"
        if reason is not None:
            state.forget()
        return reason

    def _new_run(self, old: RunState | None) -> None:
        """A run begins; `old` is the one it takes the place of."""
        if old is not None:
            old.branches.clear()
            if len(old.stats.computed_steps()) >= _TELLING_STEPS:
                self._end_of_run(old)
        for hook in self.site.hooks:
            hook.ensure()
        with self._lock:
            self._runs += 1

    def _close(self, call: Call) -> None:
        run, stats = call.run, call.run.stats
        call.syncs += self._tracker.take_syncs(run)
        stats.decisions.append(Decision(call.view.step, call.branch, call.reused, call.reason, call.score, call.syncs))
        stats.peak_bytes = max(stats.peak_bytes, run.nbytes())
        with self._lock:
            self._last = stats
            self._total_calls += 1
            self._total_reused += call.reused
        session = self._tracker.session_of(run)
        if call.view.is_last:
            run.last_step()
            for engine in list(session.engines if session is not None else ()):
                if engine is not self and session is not None:
                    engine.leave(session, call.view.step)
            self._end_of_run(run)
        if self._progress and session is not None:
            session.show(f"reused {stats.reused}/{stats.calls}")

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
        run = self._tracker.run_of(session)
        if run is not None and all(decision.step < step for decision in run.stats.decisions[-1:]):
            run.let_go()
            self._end_of_run(run)

    def _note(self, run: RunState, text: str) -> None:
        if text not in run.warned:
            run.warned.add(text)
            run.stats.notes.append(text)
            warn(f"{self.label} on `{self.name or type(self.module).__name__}`: {text}")
