"""All of it together."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cachekit import __version__
from cachekit.doctor import checks
from cachekit.doctor.checks import Check
from cachekit.doctor.devices import seen_by_torch
from cachekit.doctor.packages import PARTS, Package, Part, needed

SETTINGS = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ENABLE_MPS_FALLBACK",
    "TRANSFORMERS_OFFLINE",
)
"""Environment variables that change what happens; none of them holds a path or a secret."""


@dataclass(frozen=True)
class Report:
    """What is installed, what it runs on and whether it works. Names no path, host or user.

    Attributes:
        cachekit: its version.
        python: version and implementation of Python.
        system: operating system and processor architecture.
        backend: what torch was built for, such as "CUDA 13.0" or "CPU".
        threads: of torch.
        packages: what is needed.
        parts: what is optional.
        devices: a line for each device.
        settings: environment variables that are set and matter.
        checks: what was tried.
    """

    cachekit: str
    python: str
    system: str
    backend: str
    threads: int
    packages: tuple[Package, ...]
    parts: tuple[Part, ...]
    devices: tuple[str, ...]
    settings: dict[str, str]
    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        parts = [{**asdict(part), "version": part.version, "install": part.install} for part in self.parts]
        packages = [{**asdict(package), "problem": package.problem} for package in self.packages]
        return {**asdict(self), "packages": packages, "parts": parts, "healthy": self.healthy}


def examine(draw: bool = True) -> Report:
    """Look at everything.

    Args:
        draw: also draw with an embedded pipeline, which takes some seconds.
    """
    found = needed()
    tried = [checks.packages(found), checks.temporary_folder(), *checks.weights()]
    return Report(
        cachekit=__version__,
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        backend=backend(),
        threads=torch.get_num_threads(),
        packages=tuple(found),
        parts=PARTS,
        devices=tuple(seen_by_torch()),
        settings={name: os.environ[name] for name in SETTINGS if name in os.environ},
        checks=tuple([*tried, checks.drawing()] if draw else tried),
    )


def backend() -> str:
    """What torch was built for."""
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return "MPS" if torch.backends.mps.is_built() else "CPU"
