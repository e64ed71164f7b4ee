"""Where weights live: models that run with less memory than their weights need, on any machine."""

from offload.errors import OffloadError, OffloadWarning
from offload.handle import ComponentStats, Handle, OffloadStats
from offload.loading import load
from offload.modes import MODES, active, disable, enable

__all__ = [
    "MODES",
    "ComponentStats",
    "Handle",
    "OffloadError",
    "OffloadStats",
    "OffloadWarning",
    "active",
    "disable",
    "enable",
    "load",
]
