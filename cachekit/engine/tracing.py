"""The first computed forward pass of a branch: learns what is connected with what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from cachekit.engine.binding import Key, bind
from cachekit.engine.captures import Capture, add_changes, add_passive, probe_signal
from cachekit.engine.history import Entry
from cachekit.engine.hooks import Inner
from cachekit.engine.layout import UNKNOWN, Layout, Slot, residual_layout
from cachekit.engine.sites import PassContext, SitePass, floating_parts, frozen, kept_form
from cachekit.engine.streams import cosine, match_streams, still_fits
from cachekit.engine.taint import Taint, Where, place_of

_UNRELATED = 0.5
_PARALLEL = 0.999


@dataclass
class _Event:
    """A traced block call: arguments where a segment may begin, result where one may end."""

    slot: Slot
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    output: Any = None


class TracePass(SitePass):
    """The first computed forward pass of a branch: learns streams, dataflow and order, and keeps what it computes."""

    def __init__(self, probe: bool, learn: Callable[[Layout], None], context: PassContext) -> None:
        self._probe, self._learn, self._context = probe, learn, context
        self._taint = Taint(context.sources)
        self._events: list[_Event] = []
        self._latest: dict[str, _Event] = {}
        self._entry = Entry(context.now.step)
        self._probed = not probe
        self._after_probe = False
        self._given: dict[str, torch.Tensor] = {}
        self._returned: dict[Key, Where | None] = {}
        self._streams_of: dict[tuple[str, type], dict[Key, str]] = {}
        for each in (context, *(context.samples.contexts if context.samples else ())):
            each.history.clear()
        context.decide(None)

    def around(self, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._taint:
            return inner(*args, **kwargs)

    def run(self, slot: Slot, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._taint.suspended():
            arguments = bind(type(slot.module), args, kwargs)
            reached = {name for name, value in arguments.items() if self._taint.reaches(value)}
            known = self._streams_of.get((slot.list_name, type(slot.module)))
            capture = Capture.of(arguments, set(known.values()) if known else None, copy=True)
            output = inner(*args, **kwargs)
            if reached:
                self._taint.mark(output)
            self._record(slot, reached, capture, output)
            return output

    def finish(self) -> Entry | None:
        layout = residual_layout([event.slot for event in self._events], self._probe)
        if not layout.segments:
            return None
        self._learn(layout)
        bases: dict[int, dict[str, torch.Tensor]] = {}
        for index, (place, event) in enumerate(zip(layout.places, self._events, strict=True)):
            if place.segment is None:
                continue
            if place.enters:
                bases[place.segment] = event.before
            if place.lands:
                base = bases.pop(place.segment)
                add_changes(self._entry, place.segment, place.slot, base, event.output, self._context)
            if event.slot.form is UNKNOWN:
                add_passive(self._entry, index, place, event.output, absolute=False)
        return self._entry

    def _streams(self, slot: Slot, capture: Capture, reached: set[str], output: Any) -> dict[Key, str]:
        """Blocks of one list and class have the same streams; the first one that has any sets them."""
        known = self._streams_of.get((slot.list_name, type(slot.module)))
        if known is not None and still_fits(known, capture.values, output):
            return known
        streams = match_streams(slot.module, capture.values, reached, output, self._context.read)
        if streams:
            self._streams_of.setdefault((slot.list_name, type(slot.module)), streams)
        return streams

    def _find_side_branch(self, capture: Capture, slot: Slot) -> None:
        """Was the block before this one a side branch? Then this block's input is that block's input plus its output.

        Judged by direction, since the output may have been scaled.
        """
        last = self._events[-1].slot if self._events else None
        if last is None or last.list_name == slot.list_name or len(last.streams or ()) != 1:
            return
        key, name = next(iter((last.streams or {}).items()))
        output, before = floating_parts(self._events[-1].output)[key], self._given[name]
        for stream in (slot.streams or {}).values():
            after = capture.values[stream]
            if after.shape == before.shape and cosine(after - before, output, self._context.read) > _PARALLEL:
                last.is_side = True

    def _record(self, slot: Slot, reached: set[str], capture: Capture, output: Any) -> None:
        slot.streams = self._streams(slot, capture, reached, output)
        slot.reached = slot.reached or bool(reached)
        slot.carriers = tuple(key for key, name in slot.streams.items() if name in reached)
        slot.in_place = slot.in_place or capture.touched()
        self._find_side_branch(capture, slot)
        event = _Event(slot)
        previous = self._latest.get(slot.list_name)
        goes_on = previous is not None and previous.slot.position < slot.position
        if goes_on and previous is self._events[-1]:
            slot.restarts = self._restarts(slot, capture, previous.output)
        if not goes_on or slot.restarts or previous is not self._events[-1] or self._after_probe:
            event.before = capture.values
        if (
            previous is not None
            and goes_on
            and not slot.restarts  # what ends a segment is still needed
            and set(floating_parts(previous.output)) <= set(previous.slot.streams or ())
        ):
            previous.output = kept_form(previous.output, previous.slot.streams or {}, storage_free=False)
        event.output = frozen(output)
        self._returned = {key: place_of(part) for key, part in floating_parts(output).items()}
        self._latest[slot.list_name] = event
        self._events.append(event)
        self._given = capture.values
        self._after_probe = False
        if slot.carries_latents and not self._probed:
            self._probed, self._after_probe = True, True
            signal = probe_signal(slot, capture, output)
            self._entry.signal = None if signal is None else self._context.storage.keep(signal)

    def _restarts(self, slot: Slot, capture: Capture, before: Any) -> bool:
        """True when a block's latent input has little to do with what the block before it returned."""
        parts, streams = floating_parts(before), slot.streams or {}
        for key in slot.carriers:
            name = streams[key]
            if key not in parts or parts[key].shape != capture.values[name].shape:
                continue
            handed_on = self._returned.get(key)
            if handed_on is not None and handed_on.holds(capture.originals[name][0]):
                continue
            if cosine(parts[key], capture.values[name], self._context.read) < _UNRELATED:
                return True
        return False
