"""Where weights live: models that run with less memory than their weights need, on any machine."""

from offload.devices import RunSettings, decide_device, resolve_device
from offload.errors import DeviceError, OffloadError, OffloadWarning, SettingsError
from offload.handle import ComponentStats, Handle, OffloadStats
from offload.loading import load
from offload.modes import MODES, active, disable, enable

__all__ = [
    "MODES",
    "ComponentStats",
    "DeviceError",
    "Handle",
    "OffloadError",
    "OffloadStats",
    "OffloadWarning",
    "RunSettings",
    "SettingsError",
    "active",
    "decide_device",
    "disable",
    "enable",
    "load",
    "resolve_device",
]
