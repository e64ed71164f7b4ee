"""Exceptions and warnings of cachekit. Every message says what to do about it."""

from __future__ import annotations

import sys
import warnings


class CacheKitError(RuntimeError):
    """Base of the errors raised by cachekit."""


class UnsupportedModelError(CacheKitError):
    """The model has no place where the asked-for strategy can skip work."""


class CacheConflictError(CacheKitError):
    """Another cache, or another set of strategies, is in the way."""


class ConfigError(CacheKitError, ValueError):
    """A config has an unknown field or a bad value."""


class ProfileMismatchError(CacheKitError):
    """A calibration result does not fit the pipeline that it is used on."""


class CacheWarning(UserWarning):
    """Something did not work as a user would expect; the output is still right."""


def warn(message: str) -> None:
    """Issue a :class:`CacheWarning` that points at the first caller outside of cachekit, diffusers and torch."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, CacheWarning, stacklevel=level)


_INSIDE = ("cachekit", "diffusers", "torch", "accelerate", "contextlib")
