"""Finds out which run, step and guidance branch a denoiser call belongs to."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cachekit.engine import observers
from cachekit.engine.branches import Match
from cachekit.engine.clock import BareClock, View, calling_pipeline
from cachekit.engine.conditioning import Conditioning
from cachekit.engine.discovery import latent_names, timestep_names
from cachekit.engine.session import Session, session_of
from cachekit.engine.state import RunState


@dataclass
class _ThreadState:
    """Clock and runs of one thread, and the values it has read back since they were last asked for."""

    clock: BareClock = field(default_factory=BareClock)
    runs: dict[Session | None, RunState] = field(default_factory=dict)
    syncs: int = 0


class Tracker:
    """Keeps the runs of one denoiser apart: by thread, by pipeline, by run.

    A pipeline is found on the call stack; a loop of the user's own follows a pipeline that the cache was enabled
    through when its scheduler's entry is what the denoiser was given; everything else goes by timestep values.

    Args:
        denoiser: the model.
        replaced: called with the run that a new one takes the place of, or None.
        is_hint: tells tensors that a watched control network has returned in this step.

    Attributes:
        branches: names of the guidance branches in the order of their calls within a step; None to find out.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        replaced: Callable[[RunState | None], None],
        is_hint: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        self.latents = latent_names(denoiser)
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self.runs: weakref.WeakSet[RunState] = weakref.WeakSet()
        self._denoiser = weakref.ref(denoiser)
        self._timesteps = timestep_names(denoiser)
        self._excluded = frozenset((*self.latents, *self._timesteps, "return_dict"))
        self.branches: tuple[str, ...] | None = None
        self._replaced, self._is_hint = replaced, is_hint
        self._local = threading.local()

    def locate(self, arguments: dict[str, Any]) -> tuple[RunState, View, Match]:
        """Run, step and branch of a call with these arguments."""
        conditioning = Conditioning.of(arguments, self._excluded, self._is_hint)
        timestep = next((arguments[name] for name in self._timesteps if arguments.get(name) is not None), None)
        name = observers.context_name(self._denoiser())
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

    def take_syncs(self, run: RunState) -> int:
        """Values read back in this thread for `run` since the last call of this method."""
        thread = self._thread()
        count, thread.syncs = thread.syncs + run.book.comparer.take(), 0
        return count

    def session_of(self, run: RunState) -> Session | None:
        """The pipeline that `run` is a run of."""
        return next((session for session, other in self._thread().runs.items() if other is run), None)

    def run_of(self, session: Session) -> RunState | None:
        """This thread's current run of a pipeline."""
        return self._thread().runs.get(session)

    def abort(self) -> None:
        """A call failed: on a bare denoiser the next one begins a new run."""
        self._thread().clock.abort()

    def _scheduler_view(self, timestep: Any) -> tuple[Session, View] | None:
        tensor = timestep if isinstance(timestep, torch.Tensor) else None
        pipeline = calling_pipeline()
        if pipeline is not None:
            session = session_of(pipeline)
            self.sessions.add(session)
            view = session.clock.read(session.scheduler, tensor, getattr(pipeline, "_current_timestep", None))
            return None if view is None else (session, view)
        for session in list(self.sessions):
            view = None if session.scheduler is None else session.clock.read(session.scheduler, tensor, None)
            if view is not None and view.timestep is not None and tensor is not None:
                value = _number(tensor)
                self._thread().syncs += 1
                if any(abs(value - view.timestep / scale) <= 1e-3 * max(abs(value), 1e-6) for scale in (1, 1000)):
                    return session, view
        return None

    def _bare_view(self, conditioning: Conditioning, name: str | None, timestep: Any) -> tuple[RunState, View, Match]:
        thread = self._thread()
        value = None if timestep is None else _number(timestep)
        thread.syncs += isinstance(timestep, torch.Tensor)
        known = thread.runs.get(None)
        view = thread.clock.read(value, None if known is None else known.book.peek(conditioning, name))
        run = self._run(None, view)
        run.book.begin_step(view.step)
        match = run.book.match(conditioning, self._named(run, name), timestep)
        thread.clock.saw(match.branch.name)
        return run, view, match

    def _lead_by_timestep(self, session: Session, run: RunState) -> None:
        """From now on this run is followed by the value of its timestep; so far it had one step."""
        thread = self._thread()
        thread.syncs += 1
        value = _number(run.book.first_timestep)
        run.follow_timestep(thread.clock.take_over(value, {branch.name for branch in run.book.branches}))
        thread.runs[None] = thread.runs.pop(session)

    def _named(self, run: RunState, name: str | None) -> str | None:
        if name is None and self.branches is not None:
            return self.branches[run.book.called % len(self.branches)]
        return name

    def _stands_still(self, run: RunState, conditioning: Conditioning, name: str | None, timestep: Any) -> bool:
        """True when a branch is called again in the "same" step with another timestep: nobody steps the scheduler."""
        earlier = run.book.earlier_timestep(conditioning, name)
        if not isinstance(earlier, torch.Tensor) or not isinstance(timestep, torch.Tensor) or earlier is timestep:
            return False
        self._thread().syncs += 1
        return earlier.shape != timestep.shape or not torch.equal(earlier, timestep)

    def _run(self, session: Session | None, view: View) -> RunState:
        runs = self._thread().runs
        run = runs.get(session)
        if run is not None and run.number == view.run and run.source == view.source:
            return run
        self._replaced(run)
        for dead in [key for key in runs if key is not None and key.pipeline is None]:
            del runs[dead]
        run = runs[session] = RunState(view.run, view.steps, view.source)
        self.runs.add(run)
        return run

    def _thread(self) -> _ThreadState:
        state: _ThreadState | None = getattr(self._local, "state", None)
        if state is None:
            state = self._local.state = _ThreadState()
        return state


def _number(timestep: Any) -> float:
    """A timestep as one number; per-token timesteps by their maximum."""
    return float(timestep.float().max()) if isinstance(timestep, torch.Tensor) else float(timestep)
