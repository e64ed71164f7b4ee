"""From the order in which blocks ran to the parts of a forward pass that can be skipped.

A *segment* is a stretch of block calls whose net effect is one change of the latent stream: from the input of its first
call to the output of its last. On reuse the calls before the last hand their inputs on, the last one returns the
predicted result, and code between segments runs as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from cachekit.engine.binding import Key
from cachekit.engine.discovery import UNetParts

UNKNOWN = object()


@dataclass(eq=False)
class Slot:
    """A hooked block and what a traced forward pass taught about it.

    Attributes:
        list_name, position: where the block stands.
        streams: output key -> argument that it continues; None until traced.
        reached: True when its input depends on the latents.
        carriers: the output keys of the streams that carry the latents.
        in_place: True when the block overwrites an argument (of a UNet: the deep part that begins with it does).
        settled: True once a computed call has shown whether a UNet's deep part overwrites what it is given.
        form: what it returns, with None for every part that a stream continues; UNKNOWN until learnt or when other
            parts have to be kept of every call.
        is_side: True when its output is added to the stream that it read, instead of taking its place.
        restarts: True when its input is not what the block before it returned, but another tensor of that shape.
    """

    list_name: str
    position: int
    module: nn.Module = field(repr=False)
    streams: dict[Key, str] | None = None
    reached: bool = False
    carriers: tuple[Key, ...] = ()
    in_place: bool = False
    settled: bool = False
    is_side: bool = False
    restarts: bool = False
    form: Any = field(default=UNKNOWN, repr=False)

    @property
    def name(self) -> str:
        return f"{self.list_name}.{self.position}"

    @property
    def carries_latents(self) -> bool:
        return self.reached and bool(self.streams) and not self.is_side


@dataclass(frozen=True)
class Place:
    """The role of one block call: `segment` is None where the block always runs."""

    slot: Slot
    segment: int | None = None
    enters: bool = False
    lands: bool = False
    is_probe: bool = False

    @property
    def is_plain(self) -> bool:
        """True when a computed call of this block needs no attention."""
        return not (self.is_probe or self.enters or self.lands) and (
            self.segment is None or self.slot.form is not UNKNOWN
        )


@dataclass(frozen=True)
class Layout:
    """Roles of all block calls of a forward pass, in the order of execution.

    `absolute` means that a segment has no input to add a change to (the deep part of a UNet): its result is predicted.
    """

    places: tuple[Place, ...]
    absolute: bool = False

    @property
    def segments(self) -> int:
        return sum(place.lands for place in self.places)

    @property
    def skippable(self) -> int:
        """Number of block calls that a reuse saves."""
        return sum(place.segment is not None for place in self.places)


def residual_layout(events: Sequence[Slot], probe: bool) -> Layout:
    """Group block calls into segments. With `probe` the first call on the latent stream always runs.

    A segment reaches from a call of one list to the last call of that list in the same pass; calls of other lists on
    the latent stream in between (Latte, ConsisID) are inside it.
    """
    places: list[Place] = []
    segment, probed, index = 0, not probe, 0
    while index < len(events):
        slot = events[index]
        if not slot.carries_latents:
            places.append(Place(slot))
            index += 1
        elif not probed:
            places.append(Place(slot, is_probe=True))
            probed = True
            index += 1
        else:
            last = _end_of_pass(events, index)
            for i in range(index, last + 1):
                inside = events[i].reached
                places.append(Place(events[i], segment if inside else None, enters=i == index, lands=i == last))
            segment += 1
            index = last + 1
    return Layout(tuple(places))


def unet_layout(events: Sequence[Slot], parts: UNetParts, depth: int = 1) -> Layout:
    """The deep part of a UNet: all but the `depth` outermost blocks of both halves. The probe is the block above it."""
    outer = {id(block) for block in (*parts.down.blocks[:depth], *parts.up.blocks[-depth:])}
    inner = [i for i, slot in enumerate(events) if id(slot.module) not in outer]
    if not inner:
        return Layout(tuple(Place(slot) for slot in events), absolute=True)
    first, last = inner[0], inner[-1]
    places = [
        Place(slot, 0, enters=i == first, lands=i == last)
        if first <= i <= last
        else Place(slot, is_probe=i == first - 1)
        for i, slot in enumerate(events)
    ]
    return Layout(tuple(places), absolute=True)


def _end_of_pass(events: Sequence[Slot], start: int) -> int:
    last, position = start, events[start].position
    for i in range(start + 1, len(events)):
        if events[i].list_name == events[start].list_name:
            if events[i].position <= position or events[i].restarts:
                break
            last, position = i, events[i].position
    return last
