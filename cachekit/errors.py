"""Exceptions and warnings of cachekit. Every message says what to do about it."""

from __future__ import annotations

import warnings


class CacheKitError(RuntimeError):
    """Base of the errors raised by cachekit."""


class UnsupportedModelError(CacheKitError):
    """The model has no place where the asked-for strategy can skip work."""


class CacheConflictError(CacheKitError):
    """Another cache, or another set of strategies, is in the way."""


class CacheWarning(UserWarning):
    """Something did not work as a user would expect; the output is still right."""


def warn(message: str) -> None:
    """Issue a :class:`CacheWarning` that points outside of cachekit."""
    warnings.warn(message, CacheWarning, stacklevel=3)
