"""What is taken down of a block call: its tensors before it ran, and what a stretch of blocks changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cachekit.engine.binding import Key, is_floating, tensors_in
from cachekit.engine.conditioning import version_of
from cachekit.engine.history import Entry
from cachekit.engine.layout import UNKNOWN, Place, Slot
from cachekit.engine.sites import PassContext, floating_parts, kept_form


class Change(NamedTuple):
    """What is kept of a segment: the change of one output.

    `argument` is what the change is added to, None for nothing; `dtype` is that of the computed output.
    """

    segment: int
    key: Key
    argument: str | None
    dtype: torch.dtype


class Write(NamedTuple):
    """What is kept of a segment that overwrites an argument: by how much. Others read that tensor later."""

    segment: int
    argument: str


@dataclass
class Inputs:
    """What a segment without an input of its own was given: (tensor, in-place counter, copy) by name."""

    tensors: dict[str, tuple[torch.Tensor, int | None, torch.Tensor | None]]
    copied: bool

    @classmethod
    def of(cls, arguments: Mapping[str, Any], copy: bool) -> Inputs:
        kept = {name: value for name, value in arguments.items() if is_floating(value)}
        return cls(
            {
                name: (value.detach(), version_of(value), value.clone() if copy else None)
                for name, value in kept.items()
            },
            copy,
        )

    def written(self, read: Callable[[torch.Tensor], float]) -> set[str]:
        """Names of the tensors that hold other values by now; read back where torch keeps no counter."""
        return {
            name
            for name, (tensor, version, copy) in self.tensors.items()
            if version_of(tensor) != version
            or (version is None and copy is not None and not read((tensor == copy).all()))
        }

    def changes(self, names: set[str]) -> dict[str, torch.Tensor]:
        """By how much each of them has changed; only of copies."""
        found = {name: self.tensors[name] for name in names}
        return {name: tensor - copy for name, (tensor, _, copy) in found.items() if copy is not None}


@dataclass
class Capture:
    """Tensors of a call as they were before it: copies, or the tensors themselves with their in-place counters."""

    values: dict[str, torch.Tensor]
    originals: dict[str, tuple[torch.Tensor, int | None]]

    @classmethod
    def of(cls, arguments: Mapping[str, Any], names: set[str] | None, copy: bool) -> Capture:
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


def probe_signal(slot: Slot, capture: Capture, output: Any) -> torch.Tensor | None:
    """What the gate compares: the residual of the probe's latent stream; of a UNet block a copy of its output.

    Several residuals are flattened, sample by sample where they have the same number of them.
    None when the block wrote into its input, so that the residual is unknown; the next call copies the input first.
    """
    if not slot.streams:
        # A copy: it is a skip connection as well, into which deeper blocks may write.
        return next((part.detach().clone() for part in floating_parts(output).values()), None)
    if capture.overwritten():
        slot.in_place = True
        return None
    parts = floating_parts(output)
    residuals = [parts[key].detach() - capture.values[slot.streams[key]] for key in slot.carriers or slot.streams]
    if len(residuals) == 1:
        return residuals[0]
    alike = len({residual.shape[0] for residual in residuals}) == 1
    return torch.cat([residual.flatten(1 if alike else 0) for residual in residuals], dim=-1)


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


def stream_names(slot: Slot) -> set[str]:
    return set((slot.streams or {}).values())
