"""Exceptions and warnings of offload. Every message says what to do about it."""

from __future__ import annotations

import sys
import warnings


class OffloadError(RuntimeError):
    """Weights cannot be offloaded, or not used in this way while they are."""


class DeviceError(OffloadError, ValueError):
    """A name that is no device; the message lists the accepted ones."""


class SettingsError(OffloadError, ValueError):
    """Settings with an unknown key or a bad value, or a file of them that cannot be used."""


class OffloadWarning(UserWarning):
    """Something did not work as a user would expect; the output is still right."""


def warn(message: str) -> None:
    """Issue an :class:`OffloadWarning` that points at the first caller outside of this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, OffloadWarning, stacklevel=level)


_INSIDE = ("offload", "cachekit", "diffusers", "torch", "accelerate", "contextlib")
