"""Watches the control networks of a pipeline, where the user's control goes in.

What a control network returns is computed from the latents and changes in every step, so the denoiser's own arguments
cannot tell that the user has changed the control image, its scale or its range. The arguments of the control network
can: without latents and timestep they are the user's, and stay equal from step to step. With that known, the hints
themselves need no comparison.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from cachekit.engine.binding import bind, tensors_in
from cachekit.engine.clock import View, calling_pipeline
from cachekit.engine.conditioning import Comparer, Conditioning
from cachekit.engine.discovery import find_control_networks, latent_names, timestep_names, unwrap
from cachekit.engine.hooks import Hook, Inner
from cachekit.engine.session import Session
from cachekit.engine.weights import WeightWatch

_MOST_CALLS = 64
"""In one step; more come from a loop that does not advance this pipeline's scheduler."""


@dataclass(frozen=True)
class ControlState:
    """What a denoiser call knows about the control at its moment.

    Attributes:
        changes: number of changes in this run so far.
        calls: calls of control networks in this step so far; another number means that one came or went.
        what: the arguments that the last change was in.
    """

    changes: int
    calls: int
    what: str = field(default="", compare=False)

    def reason(self, before: ControlState) -> str:
        """Why a result from the state `before` no longer holds."""
        if self.changes != before.changes:
            return f"the control changed ({self.what})"
        return "a control network was switched on or off"


@dataclass
class _Called:
    """One call of a control network: the network, by number, and what the user gave it."""

    network: int
    conditioning: Conditioning


@dataclass
class _Book:
    """The calls of one pipeline's control networks in this step and the one before."""

    run: int = -1
    step: int = -1
    blind: tuple[int, int] = (-1, -1)
    changes: int = 0
    what: str = ""
    before: list[_Called] = field(default_factory=list)
    calls: list[_Called] = field(default_factory=list)
    hints: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    comparer: Comparer = field(default_factory=Comparer)

    def enter(self, view: View) -> None:
        if view.run != self.run:
            self.before, self.calls, self.hints = [], [], {}
        elif view.step != self.step:
            self.before, self.calls, self.hints = self.calls, [], {}
        self.run, self.step = view.run, view.step

    def take_down(self, called: _Called, is_last: bool) -> None:
        """Compare a call with the one at the same place of the step before."""
        place = len(self.calls)
        if place >= _MOST_CALLS:
            return
        if place < len(self.before):
            earlier = self.before[place]
            difference = self.comparer.compare(earlier.conditioning, called.conditioning, set())
            if earlier.network != called.network or not difference.nothing:
                changed = difference.changed | difference.reshaped | difference.structural
                self.changes, self.what = self.changes + 1, ", ".join(sorted(changed)) or "another network"
            earlier.conditioning = Conditioning({})
        if is_last:
            called.conditioning = Conditioning({})
        self.calls.append(called)

    def let_go(self) -> None:
        """Keep no tensor alive, and take the next step for the first one."""
        self.run, self.before, self.calls, self.hints = -1, [], [], {}


class ControlWatch:
    """Hooks the control networks of the pipelines that one denoiser runs in.

    Networks, pipelines and the denoiser are held weakly; hooks go with the watch.
    """

    def __init__(self) -> None:
        self._hooks: list[Hook] = []
        self._hooked: weakref.WeakKeyDictionary[Session, weakref.WeakKeyDictionary[nn.Module, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._books: weakref.WeakKeyDictionary[Session, _Book] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        weakref.finalize(self, _take_off, self._hooks)

    def follow(self, session: Session, view: View | None = None) -> None:
        """Hook those control networks of a pipeline that are not hooked yet; users replace them between runs.

        `view` is where the run is when one is going on: the calls that were made in this step have been missed then.
        """
        with self._lock:
            known = self._hooked.setdefault(session, weakref.WeakKeyDictionary())
            for network in find_control_networks(session.pipeline):
                if network in known:
                    continue
                known[network] = len(self._hooks)
                handler = partial(_handle, weakref.ref(self), weakref.ref(session), _Entrance(network, known[network]))
                self._hooks.append(Hook(network, handler))
                book = self._books.setdefault(session, _Book())
                if view is not None:
                    book.blind = view.run, view.step

    def state(self, session: Session | None, view: View) -> ControlState | None:
        """The control as it is at a denoiser call; None where nothing is watched."""
        book = None if session is None else self._books.get(session)
        if book is None or view.source != "scheduler":
            return None
        book.enter(view)
        if view.is_last and not book.calls:
            book.before = []
        # Calls before the hook was there have not been seen: say nothing about their number in this step.
        if book.blind == (view.run, view.step):
            return None
        return ControlState(book.changes, len(book.calls), book.what)

    def take_syncs(self, session: Session | None) -> int:
        """Values read back from the device since the last call of this method."""
        book = None if session is None else self._books.get(session)
        return 0 if book is None else book.comparer.take()

    def is_hint(self, tensor: torch.Tensor) -> bool:
        """True for what a watched network has returned in this step."""
        if not self._books:
            return False
        references = (book.hints.get(id(tensor)) for book in list(self._books.values()))
        return any(reference is not None and reference() is tensor for reference in references)

    def called(
        self, session: Session, entrance: _Entrance, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Book | None:
        """A control network of a pipeline is being called; returns where its hints are to be noted."""
        pipeline = calling_pipeline()
        book = self._books.get(session)
        if book is None or (pipeline is not None and pipeline is not session.pipeline):
            return None
        arguments = bind(entrance.type, args, kwargs)
        timestep = next((arguments[name] for name in entrance.timesteps if arguments.get(name) is not None), None)
        tensor = timestep if isinstance(timestep, torch.Tensor) else None
        view = session.clock.read(session.scheduler, tensor, getattr(pipeline, "_current_timestep", None))
        if view is None:
            return None
        book.enter(view)
        given = {**arguments, "its weights": entrance.weights.fingerprint()}
        book.take_down(_Called(entrance.number, Conditioning.of(given, entrance.excluded)), view.is_last)
        return book

    def let_go(self) -> None:
        """Keep no tensor alive."""
        for book in list(self._books.values()):
            book.let_go()

    def remove(self) -> None:
        """Take all hooks off."""
        _take_off(self._hooks)
        self._hooked.clear()
        self._books.clear()


class _Entrance:
    """What is known of a control network's arguments. Holds no reference to the network."""

    def __init__(self, network: nn.Module, number: int) -> None:
        core = unwrap(network)
        self.type, self.number = type(core), number
        self.timesteps = timestep_names(core)
        self.excluded = frozenset((*latent_names(core), *self.timesteps, "return_dict"))
        self.weights = WeightWatch(core)


def _handle(
    watch: weakref.ref[ControlWatch],
    session: weakref.ref[Session],
    entrance: _Entrance,
    inner: Inner,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    owner, pipeline_session = watch(), session()
    book = None
    if owner is not None and pipeline_session is not None:
        book = owner.called(pipeline_session, entrance, args, kwargs)
    output = inner(*args, **kwargs)
    if book is not None:
        book.hints.update((id(hint), weakref.ref(hint)) for hint in tensors_in(output))
    return output


def _take_off(hooks: list[Hook]) -> None:
    while hooks:
        hooks.pop().remove()
