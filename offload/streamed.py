"""The modes "group" and "disk": groups of weights come from host memory or files, two at a time, fetched ahead."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from cachekit.engine.stats import format_bytes
from offload.attachment import Attachment, refuse_compiled
from offload.errors import OffloadError, warn
from offload.files import Stored, read_header
from offload.grouping import Grouping, group_weights
from offload.handle import ComponentStats, Undo
from offload.layout import Group, returned, shift_of
from offload.sources import Files, HostMemory, load
from offload.streamer import Route, Streamer


class GroupOptions(BaseModel):
    """Options of the mode "group".

    Attributes:
        granularity: "block", or "leaf" for every module with weights of its own (least memory, slowest).
        prefetch: fetch the next group while one computes.
        low_cpu_memory: do not page-lock the weights in host memory; copies then no longer overlap.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    granularity: Literal["block", "leaf"] = "block"
    prefetch: bool = True
    low_cpu_memory: bool = False


class DiskOptions(BaseModel):
    """Options of the mode "disk".

    Attributes:
        granularity, prefetch: as for "group".
        folder: where the weights are written; a folder of its own is made in it and removed again. None takes the
            system's temporary folder.
        source: a folder that the pipeline was saved to or loaded from; nothing is written then. It must hold exactly
            the weights that the pipeline has now, which is checked.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    granularity: Literal["block", "leaf"] = "block"
    prefetch: bool = True
    folder: Path | None = None
    source: Path | None = None


class Streamed:
    """Weights of some components that take turns in the buffers of a :class:`Streamer`."""

    def __init__(self, groupings: Mapping[str, Grouping], streamer: Streamer, routes: Mapping[str, Route]) -> None:
        self._groupings, self._streamer, self._routes = dict(groupings), streamer, dict(routes)
        self.undo = Undo()

    @property
    def buffer_bytes(self) -> int:
        return self._streamer.buffer_bytes

    @property
    def extra_buffers(self) -> int:
        return self._streamer.passing_slots

    def components(self) -> dict[str, ComponentStats]:
        found: dict[str, ComponentStats] = {}
        for name, grouping in self._groupings.items():
            route = self._routes[name]
            found[name] = ComponentStats(
                grouping.nbytes, grouping.resident_bytes, route.moved_bytes, route.moves, tuple(grouping.notes)
            )
        return found

    def remove(self) -> None:
        self.undo.run()


def stream_from_memory(modules: Mapping[str, nn.Module], device: torch.device, options: GroupOptions) -> Streamed:
    """Keep the groups in host memory."""
    groupings = _group(modules, options.granularity, device)
    source = HostMemory(pin=device.type == "cuda" and not options.low_cpu_memory)
    work = _begin(modules, groupings, source, device, options.prefetch)
    try:
        for grouping in groupings.values():
            for group in grouping.groups:
                source.add(group)
                _take(work, group)
        _settle(work, modules, device)
    except BaseException:
        work.remove()
        raise
    return work


def stream_from_files(
    modules: Mapping[str, nn.Module],
    device: torch.device,
    options: DiskOptions,
    stored: Mapping[str, Mapping[str, Stored]] | None = None,
) -> Streamed:
    """Write the groups to files, or find them in those of `source`, and keep them there.

    `stored` names components that have no weights yet, and where each parameter's lie.
    """
    groupings = _group(modules, options.granularity, device)
    places: dict[Group, dict[str, Stored]] = {}
    for name, known in (stored or {}).items():
        for group in groupings[name].groups:
            places[group] = {entry.name: known[entry.name] for entry in group.entries}
    absent = list(places)
    present = {name: item for name, item in groupings.items() if name not in (stored or {})}
    if options.source is not None:
        places.update(_found(options.source, present))
    source = Files(places)
    work = _begin(modules, groupings, source, device, options.prefetch)
    try:
        if any(group not in places for item in present.values() for group in item.groups):
            folder = _folder(options.folder, present)
            work.undo.steps.insert(0, lambda: shutil.rmtree(folder, ignore_errors=True))
            source.keeps(folder)
            for name, item in present.items():
                place = Path(folder) / (name or "module")
                place.mkdir()
                for group in item.groups:
                    source.add(group, place)
                    _take(work, group)
        else:
            for item in present.values():
                for group in item.groups:
                    _take(work, group)
        _settle(work, modules, device)
        for group in absent:
            _take(work, group)
    except BaseException:
        work.remove()
        raise
    return work


def _group(modules: Mapping[str, nn.Module], granularity: str, device: torch.device) -> dict[str, Grouping]:
    for name, module in modules.items():
        refuse_compiled(name, module)
    groupings = {name: group_weights(module, granularity, device) for name, module in modules.items()}
    if not any(grouping.groups for grouping in groupings.values()):
        raise OffloadError(
            f"none of {', '.join(name or type(module).__name__ for name, module in modules.items())} has blocks in a "
            f"ModuleList whose weights could come and go; use granularity='leaf' or the mode 'model'"
        )
    return groupings


def _begin(
    modules: Mapping[str, nn.Module],
    groupings: Mapping[str, Grouping],
    source: Files | HostMemory,
    device: torch.device,
    prefetch: bool,
) -> Streamed:
    routes = {name: Route(modules[name], grouping.groups) for name, grouping in groupings.items()}
    streamer = Streamer(list(routes.values()), source, device, prefetch)
    work = Streamed(groupings, streamer, routes)
    work.undo.add(streamer.close)
    for name, route in routes.items():
        work.undo.add(Attachment(name, route, streamer).remove)
    return work


def _take(work: Streamed, group: Group) -> None:
    """Give the storage of a group's weights back; they are in the source."""
    streamer = work._streamer
    work.undo.add(lambda: streamer.restore(group))
    streamer.park(group)


def _settle(work: Streamed, modules: Mapping[str, nn.Module], device: torch.device) -> None:
    """Bring what stays to the execution device."""
    for name, module in modules.items():
        for parameter in work._groupings[name].resident.values():
            _move(work.undo, parameter, device)
        for buffer in module.buffers():
            _move(work.undo, buffer, device)


def _move(undo: Undo, tensor: torch.Tensor, device: torch.device) -> None:
    home = tensor.device
    if home == device or tensor.is_meta:
        return
    if type(tensor.data) is not torch.Tensor:
        raise OffloadError(
            f"quantised weights ({type(tensor).__name__}) are on {home} and cannot be moved from here; load the "
            f"component on {device} first, or leave it out with components=[...]"
        )

    shift = shift_of(tensor)

    def back() -> None:
        tensor.data = returned(tensor.data, home, shift)

    tensor.data = tensor.data.to(device)
    undo.add(back)


def _found(source: Path, groupings: Mapping[str, Grouping]) -> dict[Group, dict[str, Stored]]:
    """Where the weights lie in the files of a saved pipeline; the values are compared with those in memory."""
    if not source.is_dir():
        raise OffloadError(f"source={str(source)!r} is no folder; pass the folder that the pipeline was saved to")
    places: dict[Group, dict[str, Stored]] = {}
    for name, grouping in groupings.items():
        stored = stored_in(source / name if name else source)
        for group in grouping.groups:
            places[group] = {}
            for entry in group.entries:
                place = stored.get(entry.name)
                same = place is not None and place.shape == entry.shape and place.dtype == entry.dtype
                if place is None or not same or not _equal(load(place), entry.parameter.data):
                    what = "is not in" if place is None else "is another in"
                    raise OffloadError(
                        f"{name}.{entry.name} {what} {source}: the folder does not hold the weights that the pipeline "
                        f"has now; save it again with save_pretrained, or leave source= out"
                    )
                places[group][entry.name] = place
    return places


def stored_in(folder: Path, variant: str | None = None) -> dict[str, Stored]:
    """Name -> place of all tensors in the safetensors files of a component's folder.

    Raises:
        OffloadError: there are none.
    """
    ending = f".{variant}" if variant else ""
    files = [path for path in sorted(folder.glob("*.safetensors")) if _is_variant(path, ending)]
    if not files:
        raise OffloadError(
            f"{folder} has no safetensors files{f' of the variant {variant}' if variant else ''}; save the component "
            f"with save_pretrained(..., safe_serialization=True)"
        )
    found: dict[str, Stored] = {}
    for path in files:
        found.update(read_header(path))
    return found


def _is_variant(path: Path, ending: str) -> bool:
    """`model.fp16.safetensors`, `model.fp16-00001-of-00002.safetensors`; without a variant those with no such part."""
    stem = path.name.removesuffix(".safetensors").partition("-0")[0]
    return stem.endswith(ending) if ending else "." not in stem


def _equal(stored: torch.Tensor, held: torch.Tensor) -> bool:
    held = held.detach().to("cpu").contiguous()
    flat = (stored.reshape(-1).view(torch.uint8), held.reshape(-1).view(torch.uint8))
    return torch.equal(*flat)


def _folder(parent: Path | None, groupings: Mapping[str, Grouping]) -> str:
    needed = sum(grouping.nbytes for grouping in groupings.values())
    place = Path(tempfile.gettempdir()) if parent is None else parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(place).free
        if free < needed * 1.01:
            raise OffloadError(
                f"{place} has {format_bytes(free)} free and the weights need {format_bytes(needed)}; pass folder= on "
                f"another disk, or source= with the folder of the saved pipeline"
            )
        if _in_memory(place):
            warn(f"{place} is kept in memory, so that offloading to it frees nothing; pass folder= on a disk")
        return tempfile.mkdtemp(prefix="offload-", dir=place)
    except OSError as error:
        raise OffloadError(
            f"no folder for the weights can be made in {place} ({error}); pass another folder="
        ) from error


def _in_memory(place: Path) -> bool:
    """True for tmpfs and the like, where that can be told."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except (OSError, IndexError):
        return False
    home = place.resolve()
    around = [(len(where), kind) for where, kind in mounts if home.is_relative_to(where)]
    return max(around, default=(0, ""))[1] in ("tmpfs", "ramfs")
