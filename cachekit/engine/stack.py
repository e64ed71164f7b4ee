"""Site: the block stacks of a transformer, or the deep part of a UNet."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from cachekit.engine.binding import Key, bind, is_floating, items, rebuild, tensors_in
from cachekit.engine.conditioning import version_of
from cachekit.engine.discovery import BlockList, UNetParts
from cachekit.engine.history import Entry
from cachekit.engine.hooks import Inner
from cachekit.engine.layout import UNKNOWN, Layout, Place, Slot, residual_layout, unet_layout
from cachekit.engine.rules import StackSpec
from cachekit.engine.sites import PassContext, Site, StructureChangedError, floating_parts, frozen, kept_form
from cachekit.engine.streams import Read, cosine, match_streams, still_fits
from cachekit.engine.taint import Taint

LayoutKey = tuple[str, Hashable]
_UNRELATED = 0.5
_PARALLEL = 0.999


class Change(NamedTuple):
    """What is kept of a segment: the change of one output.

    `argument` is what the change is added to, None for nothing; `dtype` is that of the computed output.
    """

    segment: int
    key: Key
    argument: str | None
    dtype: torch.dtype


class StackSite(Site):
    """Hooks every block; the layout of a branch is learnt in its first computed forward pass (a UNet's is fixed)."""

    def __init__(self, spec: StackSpec, lists: list[BlockList], unet: UNetParts | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.is_unet = unet is not None
        self._description = ", ".join(f"{item.name} ({len(item.blocks)})" for item in lists)
        self._layouts: dict[LayoutKey, Layout] = {}
        slots: dict[int, Slot] = {}
        for item in lists:
            for i, block in enumerate(item.blocks):
                slots.setdefault(id(block), Slot(item.name, i, block))
        self._fixed = None if unet is None else unet_layout(list(slots.values()), unet)
        for slot in slots.values():
            self.attach(slot.module, slot)

    def remove(self) -> None:
        super().remove()
        self._layouts, self._fixed = {}, None

    def begin(self, branch: str, context: PassContext) -> TracePass | StackPass:
        key = branch, context.signature
        layout = self._fixed or self._layouts.get(key)
        return TracePass(self, key, context) if layout is None else StackPass(self, key, layout, context)

    def layout(self, branch: str) -> Layout | None:
        """The layout that a branch used last, once it is known."""
        known = [layout for (name, _), layout in self._layouts.items() if name == branch]
        return self._fixed or (known[-1] if known else None)

    def learn(self, key: LayoutKey, layout: Layout | None) -> None:
        """Set the layout of a branch at one size; None makes the next computed call learn it again."""
        self._layouts.pop(key, None)
        if layout is not None:
            self._layouts[key] = layout

    def forget(self, branch: str) -> None:
        for key in [key for key in self._layouts if key[0] == branch]:
            del self._layouts[key]

    def describe(self) -> str:
        return self._description


@dataclass
class _Capture:
    """Tensors of a call as they were before it: copies, or the tensors themselves with their in-place counters."""

    values: dict[str, torch.Tensor]
    originals: dict[str, tuple[torch.Tensor, int | None]]

    @classmethod
    def of(cls, arguments: Mapping[str, Any], names: set[str] | None, copy: bool) -> _Capture:
        kept = {
            name: value for name, value in arguments.items() if is_floating(value) and (names is None or name in names)
        }
        originals = {name: (value.detach(), version_of(value)) for name, value in kept.items()}
        values = {
            name: value.clone() if copy or version is None else value for name, (value, version) in originals.items()
        }
        return cls(values, originals)

    def touched(self) -> bool:
        """True when somebody has written into a captured tensor since."""
        return any(version_of(value) != version for value, version in self.originals.values())

    def overwritten(self) -> bool:
        """True when the captured values are lost: the tensor was written into, and it is not a copy."""
        return any(
            self.values[name] is value and version_of(value) != version
            for name, (value, version) in self.originals.items()
        )


class StackPass:
    """A forward pass with a known layout: keeps the change of every segment, or gives back predicted ones."""

    def __init__(self, site: StackSite, key: LayoutKey, layout: Layout, context: PassContext) -> None:
        self._site, self._key, self._layout, self._context = site, key, layout, context
        self._count = 0
        self._on_track = True
        self._entry = Entry(context.step)
        self._bases: dict[int, _Capture] = {}
        self._landings: dict[int, dict[Key, torch.Tensor]] = {}
        self._probing = site.spec.probe and any(place.is_probe for place in layout.places)
        self._reuse = False if self._probing else context.decide(None)

    def surround(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def passes_by(self, slot: Slot) -> bool:
        places = self._layout.places
        if self._reuse or self._probing or not self._on_track or self._count >= len(places):
            return False
        place = places[self._count]
        if place.slot is not slot or not place.is_plain:
            return False
        self._count += 1
        return True

    def run(self, slot: Slot, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index, self._count = self._count, self._count + 1
        places = self._layout.places
        if index >= len(places) or places[index].slot is not slot:
            if self._reuse:
                raise StructureChangedError
            self._on_track = False
        if not self._on_track:
            return inner(*args, **kwargs)
        place = places[index]
        if place.is_probe and self._probing:
            return self._probe(slot, inner, args, kwargs)
        if place.segment is None:
            return inner(*args, **kwargs)
        if self._reuse:
            return self._answer(index, place, place.segment, args, kwargs)
        return self._compute(index, place, place.segment, inner, args, kwargs)

    def finish(self) -> Entry | None:
        complete = self._on_track and self._count == len(self._layout.places)
        if self._reuse:
            if not complete:
                raise StructureChangedError
            return None
        if not complete:
            self._site.learn(self._key, None)
            return None
        return self._entry

    def _probe(self, slot: Slot, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._probing = False
        arguments = bind(type(slot.module), args, kwargs)
        capture = _Capture.of(arguments, _stream_names(slot), copy=slot.in_place)
        output = inner(*args, **kwargs)
        signal = probe_signal(slot, capture, output)
        self._reuse = self._context.decide(signal)
        if not self._reuse and signal is not None:
            self._entry.signal = self._context.storage.keep(signal)
        return output

    def _compute(
        self, index: int, place: Place, segment: int, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        slot, absolute = place.slot, self._layout.absolute
        if place.enters and not absolute:
            arguments = bind(type(slot.module), args, kwargs)
            self._bases[segment] = _Capture.of(arguments, _stream_names(slot), copy=slot.in_place)
        output = inner(*args, **kwargs)
        if place.lands:
            base = self._bases.pop(segment, None)
            if base is not None and base.overwritten():
                self._entering(segment).in_place = True
                self._on_track = False
                return output
            add_changes(self._entry, segment, slot, {} if base is None else base.values, output, self._context)
        add_passive(self._entry, index, place, output, absolute)
        return output

    def _entering(self, segment: int) -> Slot:
        return next(place.slot for place in self._layout.places if place.segment == segment and place.enters)

    def _answer(self, index: int, place: Place, segment: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = bind(type(place.slot.module), args, kwargs)
        if place.enters:
            self._landings[segment] = self._land(segment, arguments)
        newest = self._context.history.newest
        passive = None if newest is None else newest.passive.get(index, place.slot.form)
        if passive is UNKNOWN:
            raise StructureChangedError
        parts: dict[Key, Any] = {} if passive is None else {key: frozen(part) for key, part in items(passive)}
        for key, name in (place.slot.streams or {}).items():
            parts[key] = arguments[name]
        if place.lands:
            parts.update(self._landings.pop(segment))
        return parts[None] if passive is None else rebuild(passive, parts)

    def _land(self, segment: int, arguments: Mapping[str, Any]) -> dict[Key, torch.Tensor]:
        """The predicted result of a segment. Made at its entry, before code in between can write into the input."""
        newest = self._context.history.newest
        landing: dict[Key, torch.Tensor] = {}
        for place in () if newest is None else newest.values:
            if not isinstance(place, Change) or place.segment != segment:
                continue
            base = None if place.argument is None else arguments.get(place.argument)
            prediction = self._context.predict(place, base)
            assert prediction is not None
            if place.argument is not None:
                if base is None or base.shape != prediction.shape:
                    raise StructureChangedError
                prediction = base + prediction
            landing[place.key] = prediction.to(place.dtype)
        if not landing:
            raise StructureChangedError
        return landing


@dataclass
class _Event:
    """A traced block call: arguments where a segment may begin, result where one may end."""

    slot: Slot
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    output: Any = None


class TracePass:
    """The first computed forward pass of a branch: learns streams, dataflow and order, and keeps what it computes."""

    def __init__(self, site: StackSite, key: LayoutKey, context: PassContext) -> None:
        self._site, self._key, self._context = site, key, context
        self._taint = Taint(context.sources)
        self._events: list[_Event] = []
        self._latest: dict[str, _Event] = {}
        self._entry = Entry(context.step)
        self._probed = not site.spec.probe
        self._after_probe = False
        self._given: dict[str, torch.Tensor] = {}
        self._streams_of: dict[tuple[str, type], dict[Key, str]] = {}
        context.history.clear()
        context.decide(None)

    def surround(self) -> contextlib.AbstractContextManager[Any]:
        return self._taint

    def passes_by(self, slot: Slot) -> bool:
        return False

    def run(self, slot: Slot, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._taint.suspended():
            arguments = bind(type(slot.module), args, kwargs)
            reached = {name for name, value in arguments.items() if self._taint.reaches(value)}
            capture = _Capture.of(arguments, None, copy=True)
            output = inner(*args, **kwargs)
            if reached:
                self._taint.mark(output)
            self._record(slot, reached, capture, output)
            return output

    def finish(self) -> Entry | None:
        layout = residual_layout([event.slot for event in self._events], self._site.spec.probe)
        if not layout.segments:
            return None
        self._site.learn(self._key, layout)
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

    def _streams(self, slot: Slot, capture: _Capture, reached: set[str], output: Any) -> dict[Key, str]:
        """Blocks of one list and class have the same streams; the first one that has any sets them."""
        known = self._streams_of.get((slot.list_name, type(slot.module)))
        if known is not None and still_fits(known, capture.values, output):
            return known
        streams = match_streams(slot.module, capture.values, reached, output, self._context.read)
        self._streams_of.setdefault((slot.list_name, type(slot.module)), streams)
        return streams

    def _find_side_branch(self, capture: _Capture, slot: Slot) -> None:
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

    def _record(self, slot: Slot, reached: set[str], capture: _Capture, output: Any) -> None:
        slot.streams = self._streams(slot, capture, reached, output)
        slot.reached = slot.reached or bool(reached)
        slot.carriers = tuple(key for key, name in slot.streams.items() if name in reached)
        slot.in_place = slot.in_place or capture.touched()
        self._find_side_branch(capture, slot)
        event = _Event(slot)
        previous = self._latest.get(slot.list_name)
        goes_on = previous is not None and previous.slot.position < slot.position
        if goes_on and previous is self._events[-1]:
            slot.restarts = _restarts(slot, capture, previous.output, self._context.read)
        if not goes_on or slot.restarts or previous is not self._events[-1] or self._after_probe:
            event.before = capture.values
        if (
            previous is not None
            and goes_on
            and set(floating_parts(previous.output)) <= set(previous.slot.streams or ())
        ):
            previous.output = kept_form(previous.output, previous.slot.streams or {}, storage_free=False)
        event.output = frozen(output)
        self._latest[slot.list_name] = event
        self._events.append(event)
        self._given = capture.values
        self._after_probe = False
        if slot.carries_latents and not self._probed:
            self._probed, self._after_probe = True, True
            signal = probe_signal(slot, capture, output)
            self._entry.signal = None if signal is None else self._context.storage.keep(signal)


def probe_signal(slot: Slot, capture: _Capture, output: Any) -> torch.Tensor | None:
    """What the gate compares: the residual of the probe's latent stream; a UNet block's output as it is.

    None when the block wrote into its input, so that the residual is unknown; the next call copies the input first.
    """
    if not slot.streams:
        return next((part.detach() for part in floating_parts(output).values()), None)
    if capture.overwritten():
        slot.in_place = True
        return None
    parts = floating_parts(output)
    residuals = [parts[key].detach() - capture.values[slot.streams[key]] for key in slot.carriers or slot.streams]
    return residuals[0] if len(residuals) == 1 else torch.cat([residual.flatten() for residual in residuals])


def _restarts(slot: Slot, capture: _Capture, before: Any, read: Read) -> bool:
    """True when a block's latent input has little to do with what the block before it returned."""
    parts, streams = floating_parts(before), slot.streams or {}
    pairs = [(parts[key], capture.values[streams[key]]) for key in slot.carriers if key in parts]
    return any(a.shape == b.shape and cosine(a, b, read) < _UNRELATED for a, b in pairs)


def add_changes(
    entry: Entry, segment: int, slot: Slot, base: Mapping[str, torch.Tensor], output: Any, context: PassContext
) -> None:
    """Keep what a segment did: result minus input where they match, else the result itself."""
    streams = slot.streams or {}
    for key, part in floating_parts(output).items():
        name = streams.get(key)
        before = base.get(name) if name is not None else None
        if before is not None and before.shape == part.shape:
            place = Change(segment, key, name, part.dtype)
            entry.values[place] = context.storage.keep(part.detach() - before)
        elif name is not None or not streams:
            place = Change(segment, key, None, part.dtype)
            entry.values[place] = context.storage.keep(part.detach().clone())
        else:
            continue
        if key in slot.carriers or len(streams) < 2:
            entry.primary += (place,)


def add_passive(entry: Entry, index: int, place: Place, output: Any, absolute: bool) -> None:
    """Keep the form of a result and those parts that no stream continues."""
    slot = place.slot
    if slot.form is not UNKNOWN:
        return
    covered = dict(slot.streams or {})
    if absolute and place.lands:
        covered = dict.fromkeys(floating_parts(output), "")
    kept = kept_form(output, covered, storage_free=absolute)
    if absolute or any(True for _ in tensors_in(kept)):
        entry.passive[index] = kept
    else:
        slot.form = kept


def _stream_names(slot: Slot) -> set[str]:
    return set((slot.streams or {}).values())
