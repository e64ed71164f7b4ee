"""Which prompts a measurement takes, and what it can run on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` items, evenly spread."""
    if len(items) <= count:
        return list(items)
    return [items[(2 * i + 1) * len(items) // (2 * count)] for i in range(count)]


def require_pipeline(pipe: Any) -> None:
    """Raise TypeError for what is not a pipeline."""
    if not hasattr(pipe, "components"):
        raise TypeError(f"calibration runs a whole pipeline; pass the pipeline, not a {type(pipe).__name__}")
