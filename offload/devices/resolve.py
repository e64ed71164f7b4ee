"""The one place where a device is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from cachekit.devices import Seen, device_name, seen
from offload.devices.configuration import load_config
from offload.devices.settings import RunSettings
from offload.errors import DeviceError, warn

Rule = Literal["placement", "argument", "recipe", "user configuration", "default"]
"""What may decide, from the first that is asked to the last."""

Wanted = str | torch.device | None
Stored = RunSettings | Mapping[str, Any] | None


@dataclass(frozen=True)
class Resolution:
    """A device and why it is this one. `str()` is "cuda:1 (recipe)", with the note behind it.

    Attributes:
        device: where to compute; "cuda" is the current CUDA device.
        rule: what decided.
        asked: what stood there, such as "auto".
        note: why another device than the one asked for is taken; "" if it is the one.
    """

    device: torch.device
    rule: Rule
    asked: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.device} ({self.rule})" + (f": {self.note}" if self.note else "")


def resolve_device(
    requested: Wanted = None,
    settings: Stored = None,
    config: Stored = None,
    *,
    component: str | None = None,
    placement: Mapping[str, Wanted] | None = None,
) -> torch.device:
    """The device to compute on.

    The first of these that says something decides: the placement of the component, the argument, the settings stored
    with a recipe or run file, the user's configuration; if none does it is the CPU. Only "auto" picks an accelerator:
    CUDA, then MPS, then the CPU. "auto" in a placement follows the run. A missing accelerator gives the CPU, and a
    CUDA device with too high a number the current CUDA device, both with a warning.

    Args:
        requested: argument of the call; None and "" for nothing asked.
        settings: settings of a recipe or run file.
        config: the user's configuration; None reads it from its file.
        component: name of the component to place, if it is for one.
        placement: component -> device.

    Raises:
        DeviceError: a name that is not accepted.
        SettingsError: settings or configuration that cannot be used.
    """
    found = decide_device(requested, settings, config, component=component, placement=placement)
    if found.note:
        warn(found.note)
    return found.device


def decide_device(
    requested: Wanted = None,
    settings: Stored = None,
    config: Stored = None,
    *,
    component: str | None = None,
    placement: Mapping[str, Wanted] | None = None,
) -> Resolution:
    """As :func:`resolve_device`, with what decided, and the warning as a note."""
    asked, rule = _asked(requested, settings, config, component, placement)
    device, note = _available(asked, seen())
    return Resolution(device, rule, asked, note)


def _asked(
    requested: Wanted,
    settings: Stored,
    config: Stored,
    component: str | None,
    placement: Mapping[str, Wanted] | None,
) -> tuple[str, Rule]:
    places = {name: _named(value, f"placement of {name}: ") for name, value in (placement or {}).items()}
    own = places.get(component) if component is not None else None
    if own is not None and own != "auto":
        return own, "placement"
    argument = _named(requested)
    if argument is not None:
        return argument, "argument"
    stored = RunSettings.read(settings).device
    if stored is not None:
        return stored, "recipe"
    usual = (load_config() if config is None else RunSettings.read(config, "user configuration")).device
    return ("cpu", "default") if usual is None else (usual, "user configuration")


def _named(value: Wanted, where: str = "") -> str | None:
    try:
        return device_name(value)
    except ValueError as error:
        raise DeviceError(f"{where}{error}") from None


def _available(name: str, there: Seen) -> tuple[torch.device, str]:
    """The device of that name, or the one that takes its place and why."""
    kind, _, number = name.partition(":")
    cpu = torch.device("cpu")
    if name == "auto":
        if there.cards:
            return torch.device("cuda"), ""
        if there.mps:
            return torch.device("mps"), ""
        return cpu, "Intel XPU cannot be selected, so the CPU is used" if there.xpu else ""
    if kind == "xpu":
        return cpu, "Intel XPU cannot be selected, so the CPU is used; `cachekit devices` lists what can"
    if kind == "cuda" and not there.cards:
        return cpu, f"{name} is not available here: torch sees no CUDA device, so the CPU is used"
    if number and int(number) >= there.cards:
        several = "one CUDA device" if there.cards == 1 else f"{there.cards} CUDA devices"
        return torch.device("cuda"), f"{name} is not there: torch sees {several}, so the current one is used"
    if kind == "mps" and not there.mps:
        return cpu, "mps is not available here: torch sees no Apple GPU, so the CPU is used"
    return torch.device(name), ""
