"""Magnitude ratios for MagCache: measured over some prompts, saved, and fed to `MagCacheConfig`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cachekit.api import cached
from cachekit.calibration.fileio import header_of, read_tensors, write_tensors
from cachekit.calibration.prompts import require_pipeline
from cachekit.engine.stats import Stats
from cachekit.strategies import MagCacheConfig

_FORMAT = "cachekit.magnitudes"
_VERSION = 1


@dataclass(frozen=True)
class MagnitudeRatios:
    """Calibrated ratios, ready for `MagCacheConfig(mag_ratios=...)`.

    Attributes:
        ratios: branch -> mean ratio of each step (the first is 1).
        spread: branch -> standard deviation over the prompts; wide means that one list for all prompts is a rough fit.
        samples: number of prompts.
        model: class and component name of the denoiser that was measured.
        scheduler: class of the scheduler.
        dtype: dtype of the weights.
    """

    ratios: dict[str, tuple[float, ...]]
    spread: dict[str, tuple[float, ...]]
    samples: int
    model: str = ""
    scheduler: str = ""
    dtype: str = ""

    @property
    def steps(self) -> int:
        """Number of steps measured."""
        return max(len(curve) for curve in self.ratios.values())

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file; returns its path."""
        tensors = {}
        for name, curve in self.ratios.items():
            tensors[f"ratios/{name}"] = torch.tensor(curve, dtype=torch.float64)
            tensors[f"spread/{name}"] = torch.tensor(self.spread[name], dtype=torch.float64)
        header: dict[str, Any] = {"model": self.model, "scheduler": self.scheduler, "dtype": self.dtype}
        header |= {"format": _FORMAT, "version": _VERSION, "samples": self.samples}
        return write_tensors(path, tensors, {"cachekit": json.dumps(header)})

    @classmethod
    def load(cls, path: str | Path) -> MagnitudeRatios:
        """Read a file that :meth:`save` wrote.

        Raises:
            FileNotFoundError: no such file.
            ValueError: another kind of file, or written by a newer version.
        """
        tensors, metadata = read_tensors(path)
        header = header_of(
            path, metadata, _FORMAT, _VERSION, "no magnitude ratios; make some with cachekit.calibrate_magnitudes"
        )
        curves = {name: tuple(value.tolist()) for name, value in tensors.items()}
        return cls(
            ratios={name.split("/", 1)[1]: curve for name, curve in curves.items() if name.startswith("ratios/")},
            spread={name.split("/", 1)[1]: curve for name, curve in curves.items() if name.startswith("spread/")},
            samples=header["samples"],
            model=header["model"],
            scheduler=header["scheduler"],
            dtype=header["dtype"],
        )

    def __str__(self) -> str:
        lines = [f"magnitude ratios of {self.model} with {self.scheduler}: {self.steps} steps, {self.samples} prompts"]
        for name, curve in self.ratios.items():
            widest = max(self.spread[name])
            lines.append(f"  {name}: {min(curve):.3f}..{max(curve):.3f}, largest spread over prompts {widest:.3f}")
        return "\n".join(lines)


def calibrate_magnitudes(
    pipe: Any, prompts: str | Sequence[str], num_inference_steps: int = 28, **pipeline_kwargs: Any
) -> MagnitudeRatios:
    """Run the uncached pipeline over some prompts and measure how the residual of the block stack grows or shrinks.

    Args:
        pipe: a diffusers pipeline without an enabled cache.
        prompts: one or more prompts; a handful is enough, the spread says whether it was.
        num_inference_steps: steps to measure at; other numbers are converted later.
        **pipeline_kwargs: whatever the pipeline is called with otherwise (guidance, size, ...).

    Returns:
        Ratios per branch, averaged over the prompts (in the logarithm, since they multiply).

    Raises:
        ValueError: no prompts.
        TypeError: not a pipeline.
        RuntimeError: the runs gave no ratios, or unequal numbers of them.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts:
        raise ValueError("prompts is empty; give at least one")
    require_pipeline(pipe)
    curves: dict[str, list[list[float]]] = {}
    with cached(
        pipe, MagCacheConfig(calibrate=True, num_inference_steps=num_inference_steps), progress=False
    ) as handle:
        for text in texts:
            pipe(prompt=text, num_inference_steps=num_inference_steps, **pipeline_kwargs)
            for branch, curve in handle.stats().magnitude_ratios.items():
                curves.setdefault(branch, []).append(curve)
        model, dtype = _origin(pipe, handle.stats())
    if not curves:
        raise RuntimeError("the pipeline made no denoiser call that could be measured")
    for branch, measured in curves.items():
        lengths = sorted({len(curve) for curve in measured})
        if len(lengths) > 1:
            raise RuntimeError(
                f"runs of branch {branch!r} had unequal numbers of steps ({lengths}); calibrate them apart"
            )
    stacked = {branch: torch.tensor(measured, dtype=torch.float64) for branch, measured in curves.items()}
    return MagnitudeRatios(
        ratios={branch: tuple(table.log().mean(0).exp().tolist()) for branch, table in stacked.items()},
        spread={branch: tuple(table.std(0, correction=0).tolist()) for branch, table in stacked.items()},
        samples=len(texts),
        model=model,
        scheduler=type(getattr(pipe, "scheduler", None)).__name__,
        dtype=dtype,
    )


def _origin(pipe: Any, stats: Stats) -> tuple[str, str]:
    """Denoisers with their classes, and the dtype of the weights."""
    names = list(stats.denoisers)
    modules = [getattr(pipe, name) for name in names]
    model = ", ".join(f"{name}: {type(module).__name__}" for name, module in zip(names, modules, strict=True))
    return model, str(next(modules[0].parameters()).dtype).removeprefix("torch.")
