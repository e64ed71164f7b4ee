"""One schedule of the front: what it computes, how the rest is predicted, and what it reached."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_IDENTICAL = 200.0

Row = tuple[tuple[int, ...], tuple[float, ...]]


@dataclass(frozen=True)
class FrontPoint:
    """The best schedule found for a number of computed steps.

    Attributes:
        computed_steps: the steps to compute.
        rows: skipped step -> (steps whose results are combined, newest first; weights, which sum to 1).
        error: mean over the calibration prompts of 10 log10 of the mean square error of the final latents, dB.
        psnr: dB against the uncached picture, for each prompt that was held back; empty when none was.
    """

    computed_steps: tuple[int, ...]
    rows: dict[int, Row]
    error: float
    psnr: tuple[float, ...] = ()

    @property
    def mean_psnr(self) -> float:
        """Mean over the held-back prompts, dB; NaN without any."""
        return float(np.mean(self._capped)) if self.psnr else math.nan

    @property
    def low_psnr(self) -> float:
        """5th percentile over the held-back prompts, dB; NaN without any."""
        return float(np.percentile(self._capped, 5)) if self.psnr else math.nan

    @property
    def _capped(self) -> list[float]:
        """Pictures without any difference count as 200 dB."""
        return [min(value, _IDENTICAL) for value in self.psnr]


def point_tensors(point: FrontPoint) -> dict[str, torch.Tensor]:
    """The tensors of one schedule: steps, and per skipped step its number, sources and weights (padded)."""
    name = f"front/{len(point.computed_steps)}"
    depth = max((len(weights) for _, weights in point.rows.values()), default=1)
    sources = torch.full((len(point.rows), depth), -1, dtype=torch.int64)
    weights = torch.zeros(len(point.rows), depth, dtype=torch.float64)
    for row, (used, factors) in enumerate(point.rows.values()):
        sources[row, : len(used)] = torch.tensor(used)
        weights[row, : len(factors)] = torch.tensor(factors, dtype=torch.float64)
    return {
        f"{name}/computed_steps": torch.tensor(point.computed_steps),
        f"{name}/skipped": torch.tensor(list(point.rows), dtype=torch.int64),
        f"{name}/sources": sources,
        f"{name}/weights": weights,
        f"{name}/error": torch.tensor([point.error], dtype=torch.float64),
        f"{name}/psnr": torch.tensor(point.psnr, dtype=torch.float64),
    }


def point_from(tensors: Mapping[str, torch.Tensor], count: int) -> FrontPoint:
    """The schedule with `count` computed steps from the tensors of :func:`point_tensors`."""

    def of(part: str) -> list[Any]:
        values: list[Any] = tensors[f"front/{count}/{part}"].tolist()
        return values

    rows = {}
    for step, sources, weights in zip(of("skipped"), of("sources"), of("weights"), strict=True):
        used = tuple(source for source in sources if source >= 0)
        rows[step] = used, tuple(weights[: len(used)])
    return FrontPoint(tuple(of("computed_steps")), rows, of("error")[0], tuple(of("psnr")))
