"""The engine of one denoiser: root hook -> clock -> sites ask their gate -> compute and keep, or predict -> record."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from cachekit.engine import observers
from cachekit.engine.binding import bind, tensors_in
from cachekit.engine.branches import Match
from cachekit.engine.clock import View
from cachekit.engine.control import ControlWatch
from cachekit.engine.discovery import unwrap
from cachekit.engine.halves import CallFacts
from cachekit.engine.hooks import Hook, Inner
from cachekit.engine.member import Member, Part
from cachekit.engine.own_cache import fills_own_cache
from cachekit.engine.ranks import ANOTHER_RANK, Ranks
from cachekit.engine.rules import AttentiveGate, GateContext, Measure, Rule, ScoredGate, Verdict
from cachekit.engine.samples import CannotSplitError, batch_of, one_sample, rows_of
from cachekit.engine.session import WHOLE_COMPILE, Session, session_of
from cachekit.engine.sites import PassContext, Samples, SitePass, StructureChangedError
from cachekit.engine.state import Call, Facts, PartCall, RunState
from cachekit.engine.stats import CALIBRATION_REASON, Decision, DenoiserStats
from cachekit.engine.tracker import Tracker
from cachekit.engine.traffic import take_moved
from cachekit.engine.weights import WeightWatch
from cachekit.errors import UnsupportedModelError

_TELLING_STEPS = 4
_OTHER_WEIGHTS = "the weights, or a scale or switch of an adapter, changed"


class DenoiserEngine:
    """Caches one denoiser with one or several strategies. All state lives here, keyed by thread, pipeline, run, branch.

    Args:
        name: component name, "" for a bare module.
        module: the denoiser; held weakly.
        progress: show reuse in the pipeline's progress bar.

    Attributes:
        ranks: the processes that share the calls of this denoiser.
    """

    def __init__(self, name: str, module: nn.Module, progress: bool = True) -> None:
        self.name = name
        self.members: tuple[Member, ...] = ()
        self._parts: tuple[Part, ...] = ()
        self._progress = progress
        self._module = weakref.ref(module)
        core = unwrap(module)
        self._core = weakref.ref(core)
        self._watch = WeightWatch(core)
        self._control = ControlWatch()
        self.ranks = Ranks(core)
        self._tracker = Tracker(core, self._new_run, self._control.is_hint)
        self._local = threading.local()
        self._lock = threading.Lock()
        self.removed = False
        self._root = Hook(module, self._handle, outlook=_EngineOutlook(self))
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

    def name_branches(self, branches: Sequence[str]) -> None:
        """Give the guidance branches names, in the order of their calls within a step."""
        self._tracker.branches = tuple(branches)

    def serves(self, module: Any) -> bool:
        """True when `module` is this engine's denoiser, wrapped by `torch.compile` or not."""
        return isinstance(module, nn.Module) and unwrap(module) is self.module

    def follow(self, pipeline: Any) -> None:
        """Take steps from the scheduler of `pipeline` when it is the one that runs."""
        session = session_of(pipeline)
        self._tracker.sessions.add(session)
        session.engines.add(self)
        self._control.follow(session)

    def watch_control(self, session: Session) -> None:
        """A loop begins in a pipeline: find the control networks that it has now."""
        self._control.follow(session)

    def add(self, member: Member) -> None:
        """Let a strategy take part from the next call on."""
        for part in member.parts:
            part.site.current = partial(self._current_pass, part)
            part.site.spend = self._spend
            part.site.planned = partial(self._planned, part)
        self._set((*self.members, member))

    def take_out(self, member: Member) -> None:
        """Take a strategy off and let go of what it holds; the last one takes the engine with it."""
        if member in self.members:
            member.remove()
            self._set(tuple(other for other in self.members if other is not member))
            for run in list(self._tracker.runs):
                for part in member.parts:
                    run.forget_part(part)
        if not self.members and not self.removed:
            self.remove()

    def _set(self, members: tuple[Member, ...]) -> None:
        self.members = tuple(sorted(members, key=lambda member: member.lossless))
        parts = [part for member in self.members for part in member.parts]
        self._parts = tuple(sorted(parts, key=lambda part: part.site.rank))
        self._root.set_eager(self._hooks_inside)
        for part in parts:
            part.site.meet([other.site for other in parts if other is not part])

    def update(self, member: Member, rules: Sequence[Rule], label: str) -> None:
        """Use other rules on the same sites from the next call on; what is held is let go."""
        member.label = label
        for part, rule in zip(member.parts, rules, strict=True):
            part.rule = rule
            for run in list(self._tracker.runs):
                run.forget_part(part)

    def free(self) -> None:
        """Let go of all results that are held."""
        for run in list(self._tracker.runs):
            run.let_go()
        self._control.let_go()

    def compiled(self, module: nn.Module) -> None:
        """`module.compile()` was called somewhere in the process; take the place in front of it again."""
        for hook in (self._root, *self._site_hooks()):
            hook.ensure()
        for part in self._parts:
            part.site.compiled(module)
        if module is self.module:
            self.say_if_compiled(WHOLE_COMPILE)

    @property
    def _hooks_inside(self) -> bool:
        return any(part.site.hooks for part in self._parts)

    def _site_hooks(self) -> Iterator[Hook]:
        return (hook for part in self._parts for hook in part.site.hooks)

    def say_if_compiled(self, text: str) -> None:
        """The denoiser was compiled as a whole: matters to those that hook modules inside it."""
        if self._hooks_inside:
            self.say(text)

    def say(self, text: str) -> None:
        """Something is wrong with every cache on this denoiser as such."""
        for member in self.members:
            member.say(text)

    def remove(self) -> None:
        """Take off all hooks and let go of everything."""
        self.removed = True
        for member in self.members:
            member.remove()
        self._root.remove()
        self._control.remove()
        self.free()
        observers.release(self)
        for session in list(self._tracker.sessions):
            session.engines.discard(self)

    def stats(self) -> list[DenoiserStats]:
        """One record per strategy."""
        runs = list(self._tracker.runs)
        return [
            member.stats(self.name, sum(run.nbytes(member) for run in runs), self.ranks.count)
            for member in self.members
        ]

    # one call

    def _current_pass(self, part: Part) -> SitePass | None:
        call: Call | None = getattr(self._local, "call", None)
        if call is None:
            self._root.ensure()
            return None
        item = call.parts.get(part)
        return None if item is None else item.site_pass

    def calls_again(self) -> bool | None:
        """Whether the denoiser will run again after the call in flight in this thread, in the same run."""
        call: Call | None = getattr(self._local, "call", None)
        if call is None or call.view.steps is None:
            return None
        planned = [self._planned(part) for part in self._parts if part.site.is_whole]
        if planned:
            return False if False in planned else None if None in planned else True
        if call.view.is_last and call.run.book.awaited:
            return None if any(part.site.joins_branches for part in self._parts) else True
        return not call.view.is_last

    def _planned(self, part: Part) -> bool | None:
        """Whether a rule is known to compute later in the run in flight in this thread."""
        call: Call | None = getattr(self._local, "call", None)
        if call is None or call.view.steps is None:
            return None
        ahead = [(name, call.view.step) for name in call.run.book.awaited]
        ahead += [(call.branch, step) for step in range(call.view.step + 1, call.view.steps)]
        answers = [part.rule.computes(branch, step, call.view.steps) for branch, step in ahead]
        return True if True in answers else None if None in answers else False

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
            call.run.forget(call.branch)
            for stats in call.run.stats.values():
                stats.ended = True
            self._tracker.abort()
            raise
        self._close(call)
        for member in self.members[:1]:
            call.run.stats_of(member).overhead_seconds += call.own_seconds + time.perf_counter() - started - spent
        return output

    def _forward(self, call: Call, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        again = _with_lists_copied(args, kwargs)
        try:
            output, entries = self._attempt(call, inner, args, kwargs)
        except StructureChangedError as error:
            call.forced = str(error) or "the model ran other blocks or shapes than before"
            if isinstance(error, CannotSplitError):
                for item in call.parts.values():
                    self._cannot_split(call, item.part, call.forced)
            else:
                for member in self.members[:1]:
                    member.note(call.run.stats_of(member), call.forced)
            call.run.forget(call.branch)
            for part in self._parts:
                part.site.forget(call.branch)
            output, entries = self._attempt(call, inner, *again)
        for item, entry in entries:
            self._keep(call, item, entry)
        return output

    def _attempt(
        self, call: Call, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[tuple[PartCall, Any]]]:
        """The forward pass with a pass of every site around it, and what each of them computed."""
        call.parts, call.facts = {}, CallFacts()
        call.altered = False
        own = [id(value) for value in (*args, *kwargs.values())]

        def model(*given: Any, **named: Any) -> Any:
            call.altered |= [id(value) for value in (*given, *named.values())] != own
            return inner(*given, **named)

        forward: Inner = model
        try:
            for part in self._parts:
                item = self._begin(call, part)
                assert item.site_pass is not None
                forward = partial(_around, item.site_pass, forward)
                if item.site_pass.replaces_model:
                    break
            self._local.call = call
            output = forward(*args, **kwargs)
            return output, [(item, item.finish()) for item in call.parts.values()]
        finally:
            self._local.call = None
            for item in call.parts.values():
                item.site_pass = None

    def _begin(self, call: Call, part: Part) -> PartCall:
        item = call.parts[part] = PartCall(part, call.run.state_of(part, call.branch))
        context = PassContext(
            now=call.view,
            branch=call.branch,
            history=item.state.history,
            predictor=part.rule.predictor,
            storage=part.rule.storage,
            decide=partial(self._decide, call, item),
            arguments=call.arguments,
            sources=call.sources,
            signature=call.signature,
            read=item.read,
            others=partial(call.run.newest_of, part, call.branch),
            forced=lambda: call.forced,
            conditioning=call.conditioning,
            comparer=call.run.book.comparer,
            altered=lambda: call.altered,
            undisturbed=partial(call.undisturbed_for, item),
            facts=call.facts,
            foresee=partial(self._foresee, call, item),
            unwatched=partial(_unwatched, call),
            note=lambda text: part.member.note(call.run.stats_of(part.member), text),
            branches=self._tracker.branches,
        )
        if part.rule.per_sample:
            context = self._by_samples(call, item, context)
        item.site_pass = part.site.begin(call.branch, context)
        return item

    def _by_samples(self, call: Call, item: PartCall, context: PassContext) -> PassContext:
        """Let the samples of this call decide separately, where that is possible."""
        part = item.part
        count = batch_of(call.arguments, self._tracker.latents)
        obstacle = part.splits.get(call.signature)
        if count is None:
            obstacle = "the number of samples in a call is unclear"
        elif not part.site.splits:
            obstacle = "samples are told apart at the block stack only"
        elif self.ranks.groups:
            obstacle = "several ranks share the calls of this denoiser"
        if obstacle:
            self._cannot_split(call, part, obstacle)
        if count is None or count < 2 or obstacle:
            item.state.hold(0)
            return context
        item.state.hold(count)
        item.samples = tuple(PartCall(part, state) for state in item.state.samples)
        contexts = tuple(replace(context, history=sample.state.history) for sample in item.samples)
        return replace(
            context,
            samples=Samples(
                contexts,
                lambda: tuple(sample.reused for sample in item.samples),
                call.signature in part.splits,
                partial(part.splits.__setitem__, call.signature, ""),
                partial(setattr, call, "altered", True),
            ),
        )

    def _cannot_split(self, call: Call, part: Part, reason: str) -> None:
        if part.rule.per_sample:
            part.splits[call.signature] = reason
            part.member.note(call.run.stats_of(part.member), f"one decision for the whole batch: {reason}")

    def _keep(self, call: Call, item: PartCall, entry: Any) -> None:
        state, rule = item.state, item.part.rule
        if item.samples:
            computed = [sample for sample in item.samples if not sample.reused]
            rows = [None] * len(computed) if entry is None else rows_of(entry, len(computed))
            if rows is not None:
                following = iter(rows)
                for sample in item.samples:
                    self._keep(call, sample, None if sample.reused else next(following))
                return
            self._cannot_split(call, item.part, "what the blocks return has no dimension for the samples")
            state.hold(0)
            if len(computed) < len(item.samples):
                return
            item.samples = ()
        if item.reused:
            state.consecutive += 1
            return
        state.consecutive = 0
        if entry is None:
            state.forget()
            self._nothing_kept(call, item)
            return
        previous = state.history.newest
        if rule.observe is not None and previous is not None:
            item.score = rule.observe(previous, entry, item.read)
        state.history.push(entry)

    def _nothing_kept(self, call: Call, item: PartCall) -> None:
        member, text = item.part.member, item.nothing_kept
        if member.strict:
            member.roll_back()
            raise UnsupportedModelError(f"{member.label}: {text}")
        member.note(call.run.stats_of(member), text)

    def _foresee(self, call: Call, item: PartCall, branch: str) -> None:
        """Ask the gate for another branch, without a record of it."""
        rule, state = item.part.rule, call.run.state_of(item.part, branch)
        if rule.guards.objection(call.view, state.history, state.consecutive) is None:
            context = GateContext(call.view, branch, state.history, None, item.read, call.arguments, state.carry)
            verdict = rule.gate.decide(context)
            call.facts.refreshes |= verdict.refreshes and not verdict.reuse

    def _decide(self, call: Call, item: PartCall, signal: torch.Tensor | None, objection: str | None = None) -> bool:
        rule, state = item.part.rule, item.state
        if rule.observe is not None:
            item.reused, item.score, item.reason = False, None, CALIBRATION_REASON
            return False
        if item.samples:
            return self._decide_each(call, item, signal)
        context = GateContext(
            call.view,
            call.branch,
            state.history,
            signal,
            item.read,
            call.arguments,
            state.carry,
            fetch=item.fetch,
            refreshes=call.facts.refreshes,
        )
        objection = self._objection(call, item, objection)
        decide: Callable[[], Verdict] = partial(rule.gate.decide, context)
        if self.ranks.groups and isinstance(rule.gate, ScoredGate):
            objection, decide = self._agree(call, item, context, objection, rule.gate)
        return self._settle(call, item, context, objection, decide)

    def _agree(
        self, call: Call, item: PartCall, context: GateContext, objection: str | None, gate: ScoredGate
    ) -> tuple[str | None, Callable[[], Verdict]]:
        """Objection and verdict as all ranks that share this call come to them.

        Gates without a score are not asked here: what they decide by is the same on every rank.
        """
        measure = Measure(None, lambda score: Verdict(False))
        if objection is None:
            measure = measure if self._written(call, item) else gate.measure(context)
            objection = call.forced
        device = call.sources[0].device if call.sources else torch.device("cpu")
        computes, score = self.ranks.agree(measure.score is None, measure.score, device, item.fetch)
        if measure.score is None:
            return objection, partial(measure.judge, None)
        return (ANOTHER_RANK if computes else None), partial(measure.judge, score)

    def _decide_each(self, call: Call, item: PartCall, signal: torch.Tensor | None) -> bool:
        """Let every sample decide for itself; all scores are read back together. True when all of them reuse."""
        gate, samples = item.part.rule.gate, item.samples
        assert isinstance(gate, ScoredGate)
        if signal is not None and (not signal.ndim or signal.shape[0] != len(samples)):
            raise CannotSplitError("what the gate compares has no dimension for the samples of the batch")
        contexts = [
            GateContext(
                call.view,
                call.branch,
                sample.state.history,
                None if signal is None else signal[index : index + 1],
                item.read,
                one_sample(call.arguments, self._tracker.latents, index),
                sample.state.carry,
                item.fetch,
            )
            for index, sample in enumerate(samples)
        ]
        objections = [self._objection(call, sample) for sample in samples]
        measures = [None if why else gate.measure(context) for why, context in zip(objections, contexts, strict=True)]
        scores = item.read_all([None if measure is None else measure.score for measure in measures])
        for sample, context, why, measure, score in zip(samples, contexts, objections, measures, scores, strict=True):
            judge = partial(gate.decide, context) if measure is None else partial(measure.judge, score)
            self._settle(call, sample, context, why, judge)
        count = sum(not sample.reused for sample in samples)
        reasons = {sample.reason for sample in samples}
        item.reused, item.score = not count, max((s for s in scores if s is not None), default=None)
        item.reason = reasons.pop() if len(reasons) == 1 else f"{count} of {len(samples)} samples computed"
        return item.reused

    def _objection(self, call: Call, item: PartCall, objection: str | None = None) -> str | None:
        guards = item.part.rule.guards
        return call.forced or objection or guards.objection(call.view, item.state.history, item.state.consecutive)

    def _settle(
        self,
        call: Call,
        item: PartCall,
        context: GateContext,
        objection: str | None,
        decide: Callable[[], Verdict],
    ) -> bool:
        rule, state = item.part.rule, item.state
        item.reused, item.score = False, None
        if objection is None:
            verdict = decide()
            state.carry = verdict.carry
            item.score, item.reason = verdict.score, verdict.reason
            if verdict.note:
                item.part.member.note(call.run.stats_of(item.part.member), verdict.note)
            item.reused = verdict.reuse and verdict.is_sound and not self._written(call, item)
            call.facts.refreshes |= verdict.refreshes and not item.reused
            if not verdict.is_sound:
                item.reason = "the score is not a finite number"
                item.part.member.note(call.run.stats_of(item.part.member), item.reason)
        else:
            item.reason = objection
            if isinstance(rule.gate, AttentiveGate):
                state.carry = rule.gate.attend(context)
        if not item.reused:
            state.history.make_room()
        return item.reused

    # before and after

    def _open(self, arguments: dict[str, Any]) -> Call:
        run, view, match = self._tracker.locate(arguments)
        self._follow_run(run, view)
        tensors = (tensor for name in self._tracker.latents for tensor in tensors_in(arguments.get(name)))
        sources = tuple(tensor for tensor in tensors if tensor.is_floating_point())
        signature = tuple((tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in sources)
        call = Call(run, view, match.branch.name, arguments, sources, signature, match.branch.conditioning)
        call.forced = self._obstacle(call, match)
        return call

    def _follow_run(self, run: RunState, view: View) -> None:
        """Make the records of a new run, and of strategies that joined a run half-way."""
        for member in self.members:
            stats = run.stats_of(member)
            if member.last is not stats:
                member.last = stats
                self._take_moved()
                session = self._tracker.session_of(run)
                if session is not None:
                    session.engines.add(self)
                    self._control.follow(session, view)

    def _take_moved(self) -> int:
        core = self._core()
        return 0 if core is None else take_moved(core)

    def _obstacle(self, call: Call, match: Match) -> str | None:
        """Why nothing that was kept may be used in this call; forgets what no longer holds."""
        difference, reason = match.difference, None
        weights = call.run.weights(call.view.step, self._watch)
        control = self._control.state(self._tracker.session_of(call.run), call.view)
        last = call.run.exchange(call.branch, Facts(call.signature, weights, control))
        if call.signature != last.signature:
            reason = None if last.signature is None else "new shape, dtype or device"
        elif difference.reshaped or difference.structural:
            reason = "the conditioning has another form"
        elif difference.changed:
            reason = "the conditioning changed"
        if control != last.control and control is not None and last.control is not None:
            reason = control.reason(last.control)
        if weights != last.weights and last.weights is not None:
            reason = _OTHER_WEIGHTS
        if getattr(self._core(), "_cache_config", None) is not None:
            reason = "diffusers' own cache was enabled on this model; call its disable_cache()"
        if fills_own_cache(call.arguments):
            reason = "the call fills the model's own key/value cache"
        if torch.is_grad_enabled():
            reason = "gradients are enabled"
        if reason is not None:
            call.run.forget(call.branch)
        call.run.weigh(call.branch, call.view.step, self._watch)
        return reason

    def _written(self, call: Call, item: PartCall) -> bool:
        """Asked when a gate would reuse: True when the weights have been written into, so that nothing may be."""
        if call.forced is None and call.run.written(call.branch, call.view.step, self._watch):
            call.forced = _OTHER_WEIGHTS
            call.run.forget(call.branch)
            call.run.weigh(call.branch, call.view.step, self._watch)
        item.reason = call.forced or item.reason
        return call.forced is not None

    def _new_run(self, old: RunState | None) -> None:
        """A run begins; `old` is the one it takes the place of."""
        self.ranks.look()
        if old is not None:
            old.clear()
            for member, stats in old.stats.items():
                if len(stats.computed_steps()) >= _TELLING_STEPS:
                    member.sum_up(stats)
        for hook in self._site_hooks():
            hook.ensure()
        with self._lock:
            for member in self.members:
                member.runs += 1

    def _close(self, call: Call) -> None:
        run, number = call.run, call.run.calls
        run.calls += 1
        session = self._tracker.session_of(run)
        syncs = self._tracker.take_syncs(run) + self._control.take_syncs(session)
        moved = self._take_moved()
        for member in self.members:
            stats = run.stats_of(member)
            reused = False
            for item in call.of(member):
                read, syncs = item.syncs + syncs, 0
                stats.decisions.append(
                    Decision(
                        call.view.step,
                        call.branch,
                        item.reused,
                        item.reason,
                        item.score,
                        read,
                        number,
                        item.part.rule.name,
                        item.saving.projections,
                        item.saving.flops,
                        reused_samples=tuple(sample.reused for sample in item.samples),
                        scores=tuple(sample.score for sample in item.samples),
                        bytes_moved=moved,
                    )
                )
                moved = 0
                reused = reused or item.reused
            stats.peak_bytes = max(stats.peak_bytes, run.nbytes(member))
            with self._lock:
                member.total_calls += 1
                member.total_reused += reused
        if call.view.is_last:
            run.last_step()
            for engine in list(session.engines if session is not None else ()):
                if engine is not self and session is not None:
                    engine.leave(session, call.view.step)
            self._end_of_run(run)
        if self._progress and session is not None and self.members:
            shown = run.stats_of(self.members[0])
            session.show(f"reused {shown.reused}/{shown.calls}")

    def _end_of_run(self, run: RunState) -> None:
        for member, stats in run.stats.items():
            member.sum_up(stats)

    def leave(self, session: Session, step: int) -> None:
        """Another denoiser of the pipeline is in the last step; give back what no later call will use."""
        run = self._tracker.run_of(session)
        if run is None:
            return
        last = max((stats.decisions[-1].step for stats in run.stats.values() if stats.decisions), default=-1)
        if last < step:
            run.let_go()
            self._end_of_run(run)


class _EngineOutlook:
    """What an engine tells about the calls of its denoiser. Holds it weakly, as hooks do."""

    def __init__(self, engine: DenoiserEngine) -> None:
        self._engine = weakref.ref(engine)

    def now(self) -> bool | None:
        return True

    def later(self) -> bool | None:
        engine = self._engine()
        return None if engine is None else engine.calls_again()


def _around(site_pass: SitePass, inner: Inner, *args: Any, **kwargs: Any) -> Any:
    return site_pass.around(inner, args, kwargs)


def _with_lists_copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for another attempt: models take hints out of the lists that they are given."""
    return (
        tuple(list(value) if type(value) is list else value for value in args),
        {name: list(value) if type(value) is list else value for name, value in kwargs.items()},
    )


@contextmanager
def _unwatched(call: Call) -> Iterator[None]:
    """The model runs for a site's own purposes: no site sees it."""
    parts, call.parts = call.parts, {}
    try:
        yield
    finally:
        call.parts = parts
