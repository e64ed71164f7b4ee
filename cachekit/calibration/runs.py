"""Runs of a pipeline over prompts from fixed noise, uncached or with a schedule on trial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from cachekit.api import cached
from cachekit.calibration.fit import ClosedLoopFit, NormalEquations
from cachekit.calibration.front import Row
from cachekit.calibration.measurements import Measurements, measured
from cachekit.calibration.search import Schedule
from cachekit.calibration.trajectory import Trajectory, recorded
from cachekit.strategies import ScheduleCacheConfig
from cachekit.strategies.schedule import CoefficientTable


@dataclass
class Batch:
    """Prompts that are drawn alike, each from its own noise, `batch_size` of them at a time.

    Attributes:
        pipe: the pipeline, without an enabled cache.
        prompts: texts, at least one.
        steps: `num_inference_steps` of the pipeline.
        seed: prompt i starts from the noise of seed + i.
        arguments: what else the pipeline is called with.
        depth: number of results that a prediction combines.
        batch_size: prompts of one pipeline call; None for all. The records of all but the first call stay in host
            memory.
        references: the uncached runs in order, once :meth:`run_uncached` has been called.
        measurements: what was measured on them.
        rows: schedule -> coefficients fitted for it so far.
    """

    pipe: Any
    prompts: Sequence[str]
    steps: int
    seed: int
    arguments: dict[str, Any]
    depth: int
    batch_size: int | None = None
    references: list[Trajectory] = field(default_factory=list)
    measurements: Measurements = field(default_factory=Measurements)
    rows: dict[Schedule, dict[int, Row]] = field(default_factory=dict)

    @property
    def reference(self) -> Trajectory:
        """The uncached run of the first call."""
        return self.references[0]

    def run_uncached(self) -> None:
        """Record the references, and what can be measured along with them.

        Raises:
            ValueError: a result holds NaN or infinity, or runs differ in their number of steps.
        """
        self.references, found = [], []
        for start in self._starts():
            call, count = partial(self._call, "latent", start), len(self._part(start))
            reference, part = measured(self.pipe, call, count, drifts=not start)
            if not bool(torch.isfinite(reference.final).all()):
                raise ValueError(
                    "the uncached run ends in NaN or infinity, so there is nothing to calibrate on; try another dtype "
                    "or other arguments"
                )
            if start:
                reference.to_host()
            self.references.append(reference)
            found.append((part, count))
        lengths = sorted({len(reference) for reference in self.references})
        if len(lengths) > 1:
            raise ValueError(f"runs had unequal numbers of steps ({lengths}); calibrate them apart")
        self.measurements = Measurements.joined(found)

    def errors(self, schedule: Schedule, fitted: bool = True, order: int = 1) -> torch.Tensor:
        """Mean square error of the final latents of each prompt, (prompts,); fits coefficients on the way.

        With several calls per run each fits on the data gathered so far; the coefficients of the last one, which has
        seen all, count, and the others run again with them.

        Args:
            schedule: steps to compute.
            fitted: fit coefficients; else skipped steps are extrapolated.
            order: of that extrapolation.
        """
        gathered: dict[int, NormalEquations] = {}
        off, fit = [], None
        for start, reference in zip(self._starts(), self.references, strict=True):
            with recorded(self.pipe) as live:
                if fitted:
                    fit = ClosedLoopFit(self.pipe.scheduler, reference, live, self.depth, gathered)
                self._run(schedule, fit, order, start)
            off.append(_distance(live, reference))
        if fit is not None:
            self.rows[schedule] = fit.rows
            for index, start in enumerate(self._starts()[:-1]):
                with recorded(self.pipe) as live:
                    self._run(schedule, CoefficientTable(fit.rows), order, start)
                off[index] = _distance(live, self.references[index])
        return torch.cat(off)

    def images(self, schedule: Schedule | None = None, rows: dict[int, Row] | None = None) -> torch.Tensor:
        """Decoded pictures, floats in [0, 1] on the CPU; uncached without a schedule."""
        if schedule is None:
            return torch.cat([self._call("pt", start) for start in self._starts()])
        table = CoefficientTable(rows) if rows else None
        return torch.cat([self._run(schedule, table, 1, start, "pt") for start in self._starts()])

    def _run(
        self, schedule: Schedule, coefficients: Any, order: int, start: int, output_type: str = "latent"
    ) -> torch.Tensor:
        config = ScheduleCacheConfig(computed_steps=schedule, coefficients=coefficients, depth=self.depth, order=order)
        with cached(self.pipe, config, progress=False):
            return self._call(output_type, start)

    def _starts(self) -> range:
        return range(0, len(self.prompts), self.batch_size or len(self.prompts))

    def _part(self, start: int) -> list[str]:
        return list(self.prompts[start : start + (self.batch_size or len(self.prompts))])

    def _call(self, output_type: str, start: int = 0) -> torch.Tensor:
        part = self._part(start)
        generators = [torch.Generator().manual_seed((self.seed + start + i) % 2**32) for i in range(len(part))]
        output = self.pipe(
            prompt=part,
            num_inference_steps=self.steps,
            generator=generators,
            output_type=output_type,
            **self.arguments,
        )
        pictures: torch.Tensor = output[0]
        return pictures.float().cpu()


def relative_errors(errors: torch.Tensor, references: Sequence[Trajectory]) -> list[float]:
    """Errors of :meth:`Batch.errors` as root mean squares, in units of those of the latents they are errors of."""
    sizes = torch.cat([(run.final.double() ** 2).flatten(1).mean(1).cpu() for run in references])
    return [math.sqrt(value) for value in (errors / sizes.clamp_min(1e-30)).tolist()]


def _distance(live: Trajectory, reference: Trajectory) -> torch.Tensor:
    """Mean square of the difference of the final latents, of each sample."""
    final = live.final.double()
    return ((final - reference.final.to(final.device).double()) ** 2).flatten(1).mean(1).cpu()
