"""All conformance cases: every denoiser class of the installed diffusers, built tiny."""

from __future__ import annotations

import importlib
import pkgutil

from . import builders
from .case import REGISTRY, Case
from .enumeration import control_classes, denoiser_classes
from .loop import batched, run

__all__ = ["UNBUILDABLE", "Case", "batched", "cases", "control_classes", "denoiser_classes", "run"]

# Class name -> why it cannot be built tiny. The tests hold a frozen copy of the keys, so that this can only shrink.
UNBUILDABLE: dict[str, str] = {}


def cases() -> list[Case]:
    """Every case whose class is installed, in a fixed order."""
    for info in pkgutil.iter_modules(builders.__path__, builders.__name__ + "."):
        importlib.import_module(info.name)
    return list(REGISTRY.values())
