"""What ends a run."""

from __future__ import annotations


class RunError(Exception):
    """Settings that cannot be used; the message says why in one line."""


class ProcessDiedError(RuntimeError):
    """One of several processes did not come to its end; what was drawn is kept."""
