"""Where the weights of groups wait: in safetensors files or in host memory."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file

from offload.errors import OffloadError
from offload.files import Stored, read_header, read_into
from offload.layout import Entry, Group, contiguous, empty_at, shift_at


class Source(Protocol):
    """Gives the weights of groups, any number of times, in any thread."""

    def read(self, group: Group, buffer: torch.Tensor) -> None:
        """Put the weights of a group into a flat uint8 buffer in host memory."""
        ...

    def flat(self, group: Group) -> torch.Tensor | None:
        """The weights of a group as one flat uint8 tensor in host memory, where they are kept like that."""
        ...

    def forget(self, group: Group) -> None:
        """The weights of a group are not needed again."""
        ...


class Files:
    """Weights in safetensors files.

    Args:
        places: group -> parameter name -> where it is stored. Values stored in another dtype are converted as they
            are read.
        own: files that were written for this purpose and are deleted with the last group in them.
    """

    def __init__(self, places: Mapping[Group, Mapping[str, Stored]], own: Mapping[Group, Path] | None = None) -> None:
        self._places, self._own = dict(places), dict(own or {})
        self._finalizers: list[weakref.finalize[..., Files]] = []

    def keeps(self, folder: str) -> None:
        """Remove a folder when this object goes, should nobody have done so before."""
        self._finalizers.append(weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True))

    def add(self, group: Group, folder: Path) -> None:
        """Write the weights that a group has now into a file of its own."""
        path = folder / f"{group.name}.safetensors"
        partial = path.with_suffix(".partial")
        tensors = {entry.name: entry.parameter.data.to("cpu").contiguous() for entry in group.entries}
        try:
            save_file(tensors, partial)
            partial.replace(path)
        except Exception as error:
            partial.unlink(missing_ok=True)
            raise OffloadError(
                f"the weights could not be written to {folder} ({error}); pass another folder="
            ) from error
        self._own[group] = path
        self._places[group] = read_header(path)

    def read(self, group: Group, buffer: torch.Tensor) -> None:
        places = self._places[group]
        direct: list[tuple[Stored, torch.Tensor]] = []
        for entry in group.entries:
            stored = places[entry.name]
            if stored.dtype == entry.dtype and entry.is_contiguous:
                direct.append((stored, entry.raw(buffer)))
            else:
                entry.view(buffer).copy_(load(stored))
        read_into(direct)

    def flat(self, group: Group) -> None:
        return None

    def forget(self, group: Group) -> None:
        self._places.pop(group, None)
        path = self._own.pop(group, None)
        if path is not None:
            path.unlink(missing_ok=True)


class HostMemory:
    """Weights in host memory, one flat tensor a group; page-locked with `pin`, so that a device copies by itself."""

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._flat: dict[Group, torch.Tensor] = {}

    def add(self, group: Group) -> None:
        """Take the weights that a group has now."""
        flat = torch.empty(group.buffer_bytes, dtype=torch.uint8, pin_memory=self._pin)
        for entry in group.entries:
            entry.view(flat).copy_(entry.parameter.data)
        self._flat[group] = flat

    def read(self, group: Group, buffer: torch.Tensor) -> None:
        flat = self._flat[group]
        buffer[: len(flat)].copy_(flat)

    def flat(self, group: Group) -> torch.Tensor:
        return self._flat[group]

    def forget(self, group: Group) -> None:
        self._flat.pop(group, None)


def load(stored: Stored) -> torch.Tensor:
    """One tensor of a file in host memory, in its cache line where it would be if the file were mapped."""
    shift = shift_in_file(stored)
    held = empty_at(shift, stored.shape, contiguous(stored.shape), stored.dtype, torch.device("cpu"))
    read_into([(stored, held.reshape(-1).view(torch.uint8))])
    return held


def shift_in_file(stored: Stored) -> int:
    """What `layout.shift_of` is of a tensor in a file that is mapped, as diffusers and transformers load it."""
    return shift_at(stored.offset, stored.dtype)


def loaded(source: Source, group: Group) -> dict[Entry, torch.Tensor]:
    """The weights of a group as tensors of their own, on the devices they came from."""
    buffer = torch.empty(group.buffer_bytes, dtype=torch.uint8)
    source.read(group, buffer)
    found: dict[Entry, torch.Tensor] = {}
    for entry in group.entries:
        whole = empty_at(entry.shift, entry.shape, entry.stride, entry.dtype, entry.home)
        found[entry] = whole.copy_(entry.view(buffer))
    return found
