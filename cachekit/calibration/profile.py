"""The result of a calibration: one safetensors file that says what to compute for a given speed or quality."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cachekit.calibration.fileio import header_of, read_tensors, write_tensors
from cachekit.calibration.identity import Identity
from cachekit.errors import ProfileMismatchError

_FORMAT = "cachekit.profile"
_VERSION = 1

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
        return float(np.mean(self.psnr)) if self.psnr else math.nan

    @property
    def low_psnr(self) -> float:
        """5th percentile over the held-back prompts, dB; NaN without any."""
        return float(np.percentile(self.psnr, 5)) if self.psnr else math.nan


@dataclass(frozen=True)
class Profile:
    """A calibration: what was measured on the uncached runs, and the front of schedules found.

    Attributes:
        identity: what it was made for.
        gram: inner products between the steps' model outputs, (steps, steps).
        influence: factor of each step's model output in the final latents, (steps,).
        magnitudes: branch -> magnitude ratio of each step, for MagCache; empty where no block stack was found.
        front: schedules by rising number of computed steps.
        samples: number of calibration prompts.
        notes: what has to be known about it.
    """

    identity: Identity
    gram: torch.Tensor
    influence: torch.Tensor
    magnitudes: dict[str, tuple[float, ...]]
    front: tuple[FrontPoint, ...]
    samples: int
    notes: tuple[str, ...] = field(default=())

    @property
    def steps(self) -> int:
        """Number of scheduler steps of a run."""
        return self.identity.steps

    def choose(
        self, speedup: float | None = None, computed_steps: int | None = None, min_psnr: float | None = None
    ) -> FrontPoint:
        """The schedule for a budget; give exactly one.

        Args:
            speedup: denoiser calls uncached / computed; the number of computed calls is rounded up.
            computed_steps: number of computed steps.
            min_psnr: dB that 95 % of the held-back prompts reach.

        Raises:
            ValueError: none or several given, or outside of what was calibrated; the message says what there is.
        """
        if sum(value is not None for value in (speedup, computed_steps, min_psnr)) != 1:
            raise ValueError("give exactly one of speedup, computed_steps and min_psnr")
        if min_psnr is not None:
            return self._of_quality(min_psnr)
        if speedup is not None and not (math.isfinite(speedup) and speedup >= 1):
            raise ValueError(f"speedup: a number of at least 1, got {speedup!r}")
        wanted = math.ceil(self.steps / speedup - 1e-9) if speedup is not None else int(computed_steps or 0)
        for point in self.front:
            if len(point.computed_steps) == wanted:
                return point
        counts = [len(point.computed_steps) for point in self.front]
        raise ValueError(
            f"no schedule with {wanted} of {self.steps} computed steps in this profile; it has "
            f"{counts[0]} to {counts[-1]} (speedup {self.steps / counts[-1]:.2f} to {self.steps / counts[0]:.2f}); "
            f"calibrate again with budgets=[{wanted}]"
        )

    def require(self, target: Any) -> None:
        """Refuse a pipeline or denoiser that this profile was not made for.

        Raises:
            ProfileMismatchError: lists what differs.
        """
        differences = self.identity.differences(target)
        if differences:
            raise ProfileMismatchError(
                f"this profile was made for another pipeline; different: {'; '.join(differences)}. Calibrate again, or "
                f"pass check=False to use it nevertheless"
            )

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file; returns its path."""
        tensors = {"gram": self.gram, "influence": self.influence}
        for branch, curve in self.magnitudes.items():
            tensors[f"magnitudes/{branch}"] = torch.tensor(curve, dtype=torch.float64)
        for point in self.front:
            tensors |= _point_tensors(point)
        header = {"format": _FORMAT, "version": _VERSION, "samples": self.samples, "notes": list(self.notes)}
        return write_tensors(path, tensors, {"cachekit": json.dumps(header), "identity": self.identity.to_json()})

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a file that :meth:`save` wrote.

        Raises:
            FileNotFoundError: no such file.
            ValueError: another kind of file, or written by a newer version.
        """
        tensors, metadata = read_tensors(path)
        missing, complete = "no profile; make one with cachekit.calibrate", "identity" in metadata
        header = header_of(path, metadata if complete else {}, _FORMAT, _VERSION, missing)
        counts = sorted({int(name.split("/")[1]) for name in tensors if name.startswith("front/")})
        return cls(
            identity=Identity.from_json(metadata["identity"]),
            gram=tensors["gram"],
            influence=tensors["influence"],
            magnitudes={
                name.split("/", 1)[1]: tuple(value.tolist())
                for name, value in tensors.items()
                if name.startswith("magnitudes/")
            },
            front=tuple(_point(tensors, count) for count in counts),
            samples=header["samples"],
            notes=tuple(header["notes"]),
        )

    def __str__(self) -> str:
        who = ", ".join(item.model for item in self.identity.denoisers.values())
        lines = [f"profile of {who} with {self.identity.scheduler}: {self.steps} steps, {self.samples} prompts"]
        lines.append("  computed  speed-up  PSNR dB  5th percentile   (held-back prompts)")
        for point in self.front:
            count = len(point.computed_steps)
            lines.append(f"  {count:>8}  {self.steps / count:>7.2f}x  {point.mean_psnr:>7.1f}  {point.low_psnr:>14.1f}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _of_quality(self, min_psnr: float) -> FrontPoint:
        for point in self.front:
            if point.low_psnr >= min_psnr:
                return point
        if not any(point.psnr for point in self.front):
            raise ValueError(
                "no prompts were held back in this calibration, so its quality is unknown; calibrate again"
            )
        best = max(point.low_psnr for point in self.front)
        raise ValueError(f"no schedule in this profile reaches {min_psnr:g} dB; the best has {best:.1f} dB")


def _point_tensors(point: FrontPoint) -> dict[str, torch.Tensor]:
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


def _point(tensors: dict[str, torch.Tensor], count: int) -> FrontPoint:
    def of(part: str) -> list[Any]:
        values: list[Any] = tensors[f"front/{count}/{part}"].tolist()
        return values

    rows = {}
    for step, sources, weights in zip(of("skipped"), of("sources"), of("weights"), strict=True):
        used = tuple(source for source in sources if source >= 0)
        rows[step] = used, tuple(weights[: len(used)])
    return FrontPoint(tuple(of("computed_steps")), rows, of("error")[0], tuple(of("psnr")))
