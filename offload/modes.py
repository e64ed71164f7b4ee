"""`offload.enable` and `offload.disable`: one verb for all modes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import nn

from offload.errors import OffloadError, warn
from offload.handle import Handle, Mode, handles_of, lock, modules_of, remember
from offload.hooked import NoOptions, offload_models, release_foreign_hooks
from offload.sequential import offload_sequentially
from offload.streamed import DiskOptions, GroupOptions, stream_from_files, stream_from_memory
from offload.target import execution_device

_OPTIONS: dict[str, type[BaseModel]] = {
    "model": NoOptions,
    "group": GroupOptions,
    "sequential": NoOptions,
    "disk": DiskOptions,
}
MODES = tuple(_OPTIONS)
"""From fast to small; "disk" works on every machine."""


def enable(
    target: Any,
    mode: str,
    device: str | torch.device = "auto",
    *,
    components: Sequence[str] | None = None,
    **options: Any,
) -> Handle:
    """Let a pipeline run with less memory than its weights need. Output stays bit-identical on the same device.

    Enabling again, in the same or another mode, takes the place of what was enabled before. Weights of what a
    `cachekit` cache skips are not moved, whichever of the two was enabled first.

    Args:
        target: a pipeline; for "group" and "disk" a module as well.
        mode: "model" moves whole components, "group" blocks, "sequential" single layers between host memory and the
            accelerator; "disk" reads blocks from files and works with the CPU too.
        device: where the weights compute; "auto" is the accelerator where there is one.
        components: of "group" and "disk": names of those to offload; the others stay as they are. None for all.
        **options: see :class:`GroupOptions` and :class:`DiskOptions`.

    Returns:
        A handle to look at and to disable it. Without an accelerator "model", "group" and "sequential" change nothing,
        warn, and the handle says why.

    Raises:
        OffloadError: it cannot be done; the message says what to do. The pipeline is then not offloaded.
        ValueError, TypeError: an unknown mode, option or component.
    """
    chosen = checked(mode, options)
    with lock:
        modules = _chosen_modules(target, mode, components)
        place = execution_device(device)
        if mode != "disk" and not can_offload_to(place):
            for handle in handles_of(target):
                handle.disable()
            reason = (
                f"there is no accelerator, so the mode {mode!r} has nothing to move weights to and nothing was "
                f"changed; offload.enable(pipe, 'disk') needs less memory on any machine"
            )
            warn(reason)
            return Handle("none", place, reason=reason)
        for handle in handles_of(target):
            handle.disable()
        release_foreign_hooks(target)
        handle = Handle(mode, place, _start(target, modules, mode, place, chosen))
        remember(target, handle)
        return handle


def disable(target: Any) -> None:
    """Put weights, devices and hooks of a pipeline or module back; no offloading is no error."""
    with lock:
        for handle in handles_of(target):
            handle.disable()


def active(target: Any) -> Handle | None:
    """The handle in force on a pipeline or module, or None."""
    return next(iter(handles_of(target)), None)


def can_offload_to(device: torch.device) -> bool:
    """True for devices with memory of their own."""
    return device.type != "cpu"


def _start(target: Any, modules: dict[str, nn.Module], mode: str, device: torch.device, chosen: Any) -> Mode:
    if mode == "model":
        return offload_models(target, device, chosen)
    if mode == "sequential":
        return offload_sequentially(target, device, chosen)
    if mode == "group":
        return stream_from_memory(modules, device, chosen)
    return stream_from_files(modules, device, chosen)


def checked(mode: str, options: dict[str, Any]) -> BaseModel:
    kind = _OPTIONS.get(mode)
    if kind is None:
        raise ValueError(f"unknown mode {mode!r}; the modes are {', '.join(MODES)}")
    try:
        return kind(**options)
    except ValidationError as error:
        known = ", ".join(kind.model_fields) or "none"
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{mode}: {name}: {first['msg']}; its options are {known}") from error


def _chosen_modules(target: Any, mode: str, components: Sequence[str] | None) -> dict[str, nn.Module]:
    modules = modules_of(target)
    if not modules:
        raise OffloadError(f"{type(target).__name__} has no components with weights")
    if mode in ("model", "sequential") and (components is not None or isinstance(target, nn.Module)):
        raise ValueError(f"{mode!r} is for all components of a pipeline; use 'group' or 'disk' for some or one")
    unknown = [name for name in components or () if name not in modules]
    if unknown:
        raise ValueError(f"there is no component {unknown[0]!r}; there are {', '.join(modules)}")
    return modules if components is None else {name: modules[name] for name in components}
