"""Every tiny pipeline of the end-to-end tests, by name."""

from __future__ import annotations

import importlib
import pkgutil

from . import families
from .base import TinyPipeline

__all__ = ["TINY", "TinyPipeline"]

MODULES = [
    importlib.import_module(f"{families.__name__}.{info.name}") for info in pkgutil.iter_modules(families.__path__)
]
TINY: dict[str, TinyPipeline] = {tiny.name: tiny for module in MODULES for tiny in module.family()}
