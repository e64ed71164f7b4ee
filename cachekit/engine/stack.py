"""Site: the block stacks of a transformer, or the deep part of a UNet."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch

from cachekit.engine.binding import Key, bind, items, rebuild
from cachekit.engine.captures import (
    Capture,
    Change,
    Inputs,
    Write,
    add_changes,
    add_passive,
    probe_signal,
    stream_names,
)
from cachekit.engine.discovery import BlockList, UNetParts
from cachekit.engine.history import Entry
from cachekit.engine.hooks import Inner
from cachekit.engine.layout import UNKNOWN, Layout, Place, Slot, unet_layout
from cachekit.engine.rules import StackSpec
from cachekit.engine.samples import CannotSplitError, Split, copied, joined
from cachekit.engine.sites import PassContext, Site, SitePass, StructureChangedError, frozen
from cachekit.engine.tracing import TracePass

LayoutKey = tuple[str, Hashable]


class StackSite(Site):
    """Hooks every block; the layout of a branch is learnt in its first computed forward pass (a UNet's is fixed)."""

    rank = 1
    splits = True

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
        self._fixed = None if unet is None else unet_layout(list(slots.values()), unet, spec.depth)
        for slot in slots.values():
            self.attach(slot.module, slot)

    def remove(self) -> None:
        super().remove()
        self._layouts, self._fixed = {}, None

    def begin(self, branch: str, context: PassContext) -> TracePass | StackPass:
        key = branch, context.signature
        layout = self._fixed or self._layouts.get(key)
        if layout is None:
            return TracePass(self.spec.probe, partial(self.learn, key), context)
        return StackPass(layout, self.spec.probe, partial(self.learn, key, None), context)

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

    def always_runs(self, slot: Slot) -> bool:
        layouts = [self._fixed] if self._fixed is not None else list(self._layouts.values())
        places = [place for layout in layouts for place in layout.places if place.slot is slot]
        return bool(places) and all(place.segment is None for place in places)

    def describe(self) -> str:
        return self._description


class StackPass(SitePass):
    """A forward pass with a known layout: keeps the change of every segment, or gives back predicted ones.

    Where some samples of the batch compute and others reuse, it does the one for the former and the other for the
    latter, block by block.
    """

    def __init__(self, layout: Layout, probe: bool, unlearn: Callable[[], None], context: PassContext) -> None:
        self._layout, self._unlearn, self._context = layout, unlearn, context
        self._count = 0
        self._on_track = True
        self._entry = Entry(context.now.step)
        self._bases: dict[int, Capture] = {}
        self._inputs: dict[int, Inputs] = {}
        self._landings: dict[int, dict[Key, torch.Tensor]] = {}
        self._probing = probe and any(place.is_probe for place in layout.places)
        self._reuse = self._settled = False
        self._reusing: tuple[PassContext, ...] = (context,)
        self._split: Split | None = None
        self._errors: list[torch.Tensor] = []
        if not self._probing:
            self._settle(None)

    def passes_by(self, slot: Slot) -> bool:
        places = self._layout.places
        if self._reuse or self._split or self._probing or not self._on_track or self._count >= len(places):
            return False
        place = places[self._count]
        if place.slot is not slot or not place.is_plain:
            return False
        self._count += 1
        return True

    def will_run(self, slot: Slot) -> bool | None:
        ahead = (place for place in self._layout.places[self._count :] if place.slot is slot)
        place = next(ahead, None)
        if place is None or place.segment is None or not self._on_track:
            return True
        return not self._reuse if self._settled else None

    def run(self, slot: Slot, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index, self._count = self._count, self._count + 1
        places = self._layout.places
        if index >= len(places) or places[index].slot is not slot:
            if self._reuse or self._split:
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
        if self._split:
            return self._compute_some(self._split, index, place, place.segment, inner, args, kwargs)
        return self._compute(index, place, place.segment, inner, args, kwargs)

    def finish(self) -> Entry | None:
        complete = self._on_track and self._count == len(self._layout.places)
        if not complete and (self._reuse or self._split):
            raise StructureChangedError
        if self._reuse:
            return None
        if not complete:
            self._unlearn()
            return None
        if self._errors:
            self._prove()
        return self._entry

    def _settle(self, signal: torch.Tensor | None) -> None:
        """Ask who reuses: all, none, or some samples of the batch."""
        self._reuse, self._settled = self._context.decide(signal), True
        samples = self._context.samples
        if samples is not None:
            reused = samples.reused()
            self._reusing = tuple(context for context, reuses in zip(samples.contexts, reused, strict=True) if reuses)
            if 0 < len(self._reusing) < len(reused):
                self._split = Split(reused)
                samples.split()

    def _probe(self, slot: Slot, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._probing = False
        arguments = bind(type(slot.module), args, kwargs)
        capture = Capture.of(arguments, stream_names(slot), copy=slot.in_place)
        output = inner(*args, **kwargs)
        signal = probe_signal(slot, capture, output)
        self._settle(signal)
        if not self._reuse and signal is not None:
            kept = self._split.part(signal, reused=False) if self._split else signal
            self._entry.signal = self._context.storage.keep(kept)
        return output

    def _compute(
        self, index: int, place: Place, segment: int, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        slot, absolute = place.slot, self._layout.absolute
        if place.enters and not absolute:
            arguments = bind(type(slot.module), args, kwargs)
            self._bases[segment] = Capture.of(arguments, stream_names(slot), copy=slot.in_place)
        elif place.enters and (slot.in_place or not slot.settled or not torch.is_inference_mode_enabled()):
            arguments = bind(type(slot.module), args, kwargs)
            self._inputs[segment] = Inputs.of(arguments, copy=slot.in_place or not slot.settled)
        output = inner(*args, **kwargs)
        if place.lands:
            if not self._keep_writes(segment):
                self._on_track = False
                return output
            base = self._bases.pop(segment, None)
            if base is not None and base.overwritten():
                self._entering(segment).in_place = True
                self._on_track = False
                return output
            add_changes(self._entry, segment, slot, {} if base is None else base.values, output, self._context)
        add_passive(self._entry, index, place, output, absolute)
        return output

    def _keep_writes(self, segment: int) -> bool:
        """Keep what a UNet's deep part wrote into its input, a skip connection of the part that always runs.

        False when that is lost because the input was not copied; the next call copies it.
        """
        inputs = self._inputs.pop(segment, None)
        if inputs is None:
            return True
        slot = self._entering(segment)
        written = inputs.written(self._context.read)
        slot.in_place, slot.settled = slot.in_place or bool(written), True
        for name, change in inputs.changes(written).items():
            self._entry.values[Write(segment, name)] = self._context.storage.keep(change)
        return inputs.copied or not written

    def _compute_some(
        self,
        split: Split,
        index: int,
        place: Place,
        segment: int,
        inner: Inner,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A block call in which some samples compute and the others reuse.

        The first such pass of a form computes all samples as well, and compares: what mixes samples, or an argument
        that only looks as if it had one row a sample, is noticed.
        """
        some, others = split.part((args, kwargs), reused=False), split.part((args, kwargs), reused=True)
        answered = self._answer(index, place, segment, *others)
        assert self._context.samples is not None
        if self._context.samples.is_proven:
            return split.join(self._compute(index, place, segment, inner, *some), answered)
        try:
            before, whole = copied(some), copied((args, kwargs))
            computed = self._compute(index, place, segment, inner, *some)
            self._errors.append(split.error(inner(*whole[0], **whole[1]), computed, before))
        except StructureChangedError:
            raise
        except Exception as error:
            raise CannotSplitError(f"{place.slot.name} does not run on a part of the batch ({error})") from error
        return split.join(computed, answered)

    def _prove(self) -> None:
        worst = self._context.read(torch.stack([error.to(self._errors[0].device) for error in self._errors]).max())
        if worst > 1:
            raise CannotSplitError("the samples of this batch influence each other, or their arguments cannot be told")
        assert self._context.samples is not None
        if worst <= 1:
            self._context.samples.prove()

    def _entering(self, segment: int) -> Slot:
        return next(place.slot for place in self._layout.places if place.segment == segment and place.enters)

    def _answer(self, index: int, place: Place, segment: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = bind(type(place.slot.module), args, kwargs)
        if place.enters:
            self._landings[segment] = self._land(segment, arguments)
            self._write(segment, arguments)
        kept = [context.history.newest for context in self._reusing]
        forms = [None if newest is None else newest.passive.get(index, place.slot.form) for newest in kept]
        if any(form is UNKNOWN for form in forms):
            raise StructureChangedError
        passive = joined(forms)
        parts: dict[Key, Any] = {} if passive is None else {key: frozen(part) for key, part in items(passive)}
        for key, name in (place.slot.streams or {}).items():
            parts[key] = arguments[name]
        if place.lands:
            parts.update(self._landings.pop(segment))
        return parts[None] if passive is None else rebuild(passive, parts)

    def _land(self, segment: int, arguments: Mapping[str, Any]) -> dict[Key, torch.Tensor]:
        """The predicted result of a segment. Made at its entry, before code in between can write into the input."""
        if len(self._reusing) == 1:
            return self._predicted(self._reusing[0], segment, arguments)
        rows = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor) and value.ndim}
        bases = [{name: value[i : i + 1] for name, value in rows.items()} for i in range(len(self._reusing))]
        landings = [self._predicted(*each) for each in zip(self._reusing, repeat(segment), bases, strict=False)]
        return {key: torch.cat([landing[key] for landing in landings]) for key in landings[0]}

    def _predicted(self, context: PassContext, segment: int, arguments: Mapping[str, Any]) -> dict[Key, torch.Tensor]:
        newest = context.history.newest
        landing: dict[Key, torch.Tensor] = {}
        for place in () if newest is None else newest.values:
            if not isinstance(place, Change) or place.segment != segment:
                continue
            base = None if place.argument is None else arguments.get(place.argument)
            prediction = context.predict(place, base)
            assert prediction is not None
            if place.argument is not None:
                if base is None or base.shape != prediction.shape:
                    raise StructureChangedError
                prediction = base + prediction
            landing[place.key] = prediction.to(place.dtype)
        if not landing:
            raise StructureChangedError
        return landing

    def _write(self, segment: int, arguments: Mapping[str, Any]) -> None:
        """Overwrite the input of a segment as computing it would have."""
        for context in self._reusing:
            newest = context.history.newest
            written = [place for place in (newest.values if newest else ()) if isinstance(place, Write)]
            if written and self._context.samples is not None:
                raise CannotSplitError("the deep part of this UNet writes into a skip connection")
            self._write_again(context, [place for place in written if place.segment == segment], arguments)

    def _write_again(self, context: PassContext, places: Sequence[Write], arguments: Mapping[str, Any]) -> None:
        for place in places:
            target = arguments.get(place.argument)
            change = None if target is None else context.predict(place, target)
            if target is None or change is None or target.shape != change.shape:
                raise StructureChangedError
            target.add_(change)
