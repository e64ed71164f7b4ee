"""What the conformance cases are known to lack; everything else has to work."""

from __future__ import annotations

from .cases import cases

# Transformers; and StableCascade, whose levels are lists of blocks and take their skips inside the up path.
NO_DEEP_PART = frozenset(case.name for case in cases() if case.kind != "unet" or case.name == "stable-cascade-prior")

REFUSED: dict[str, tuple[frozenset[str], str]] = {"deepcache": (NO_DEEP_PART, "is no UNet")}
"""Strategy -> the cases that it refuses, and what the refusal says."""
