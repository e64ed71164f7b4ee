"""Runs of a pipeline over a batch of prompts from fixed noise, uncached or with a schedule on trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cachekit.api import cached
from cachekit.calibration.fit import ClosedLoopFit
from cachekit.calibration.profile import Row
from cachekit.calibration.search import Schedule
from cachekit.calibration.trajectory import Trajectory, recorded
from cachekit.errors import UnsupportedModelError
from cachekit.strategies import MagCacheConfig, ScheduleCacheConfig
from cachekit.strategies.schedule import CoefficientTable


@dataclass
class Batch:
    """Prompts that run together, each from its own noise.

    Attributes:
        pipe: the pipeline, without an enabled cache.
        prompts: texts, at least one.
        steps: `num_inference_steps` of the pipeline.
        seed: prompt i starts from the noise of seed + i.
        arguments: what else the pipeline is called with.
        depth: number of results that a prediction combines.
        reference: the uncached run, once :meth:`run_uncached` has been called.
        rows: schedule -> coefficients fitted for it so far.
    """

    pipe: Any
    prompts: Sequence[str]
    steps: int
    seed: int
    arguments: dict[str, Any]
    depth: int
    reference: Trajectory = field(default_factory=Trajectory)
    magnitudes: dict[str, tuple[float, ...]] = field(default_factory=dict)
    rows: dict[Schedule, dict[int, Row]] = field(default_factory=dict)

    def run_uncached(self) -> None:
        """Record the reference, and the magnitude ratios along with it where there is a block stack."""
        try:
            listen = cached(self.pipe, MagCacheConfig(calibrate=True, num_inference_steps=self.steps), progress=False)
            with listen as handle, recorded(self.pipe) as self.reference:
                self._call("latent")
                self.magnitudes = {name: tuple(curve) for name, curve in handle.stats().magnitude_ratios.items()}
        except UnsupportedModelError:
            with recorded(self.pipe) as self.reference:
                self._call("latent")

    def errors(self, schedule: Schedule, fitted: bool = True) -> torch.Tensor:
        """Mean square error of the final latents of each prompt, (batch,); fits coefficients on the way."""
        with recorded(self.pipe) as live:
            fit = ClosedLoopFit(self.pipe.scheduler, self.reference, live, self.depth) if fitted else None
            with cached(self.pipe, self._config(schedule, fit), progress=False):
                self._call("latent")
        self.rows[schedule] = {} if fit is None else fit.rows
        return ((live.final.double() - self.reference.final.double()) ** 2).flatten(1).mean(1)

    def images(self, schedule: Schedule | None = None, rows: dict[int, Row] | None = None) -> torch.Tensor:
        """Decoded pictures, floats in [0, 1] on the CPU; uncached without a schedule."""
        if schedule is None:
            return self._call("pt")
        with cached(self.pipe, self._config(schedule, CoefficientTable(rows) if rows else None), progress=False):
            return self._call("pt")

    def _config(self, schedule: Schedule, coefficients: Any) -> ScheduleCacheConfig:
        return ScheduleCacheConfig(computed_steps=schedule, coefficients=coefficients, depth=self.depth)

    def _call(self, output_type: str) -> torch.Tensor:
        generators = [torch.Generator().manual_seed((self.seed + i) % 2**32) for i in range(len(self.prompts))]
        output = self.pipe(
            prompt=list(self.prompts),
            num_inference_steps=self.steps,
            generator=generators,
            output_type=output_type,
            **self.arguments,
        )
        pictures: torch.Tensor = output[0]
        return pictures.float().cpu()
