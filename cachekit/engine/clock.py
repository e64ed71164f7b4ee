"""Where a run is: run, step, number of steps. Needs no help from the pipeline.

Through a pipeline the scheduler tells: `set_timesteps` makes a new `timesteps` tensor (a new run) and `step` advances
`step_index`; schedulers without that attribute (DDIM, PNDM, DDPM) are followed through the storage offset of the
timestep that the pipeline passes on, which is a view of `scheduler.timesteps`. Neither reads a value back from the
device. A bare denoiser, or a pipeline whose scheduler stands still, is followed by the value of its timestep.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from cachekit.engine.noise import NoiseLevels, TimeScale, noise_levels


@dataclass(frozen=True)
class View:
    """Read-only "now" of one denoiser call.

    Attributes:
        run: counts the runs of this clock from 0.
        step: position in the executed schedule, from 0.
        steps: number of scheduler steps of the run; None on a bare denoiser.
        source: "scheduler" or "timestep", whichever told the step.
        timestep: value of the current entry of the scheduler's timesteps, if read without cost, else None.
        sigma: noise level of the current entry as the scheduler stores it, else None.
        noise: share of noise in the latents, 0..1, and `noise_source` what told it (see `cachekit.engine.noise`);
            None where only timesteps are known.
        scale: how timesteps become noise on a bare denoiser; None until the timestep has changed once.
    """

    run: int
    step: int
    steps: int | None
    source: str
    timestep: float | None = None
    sigma: float | None = None
    noise: float | None = None
    noise_source: str = ""
    scale: TimeScale | None = None

    @property
    def is_last(self) -> bool:
        """True in the last scheduler step."""
        return self.steps is not None and self.step >= self.steps - 1


@dataclass
class SchedulerClock:
    """Follows one pipeline's scheduler; shared by all denoisers of that pipeline."""

    run: int = -1
    stuck: bool = False
    _timesteps: torch.Tensor | None = None
    _values: list[float] = field(default_factory=list)
    _sigmas: list[float] = field(default_factory=list)
    _noise: NoiseLevels = field(default_factory=lambda: NoiseLevels((), ""))
    _index: int = 0
    _start: int | None = None
    _provisional: bool = False

    def read(self, scheduler: Any, timestep: torch.Tensor | None, hint: torch.Tensor | None) -> View | None:
        """The current view, or None when the scheduler cannot tell (no timesteps yet, or it stands still).

        Args:
            scheduler: a diffusers scheduler.
            timestep: the denoiser's timestep argument.
            hint: the pipeline's `_current_timestep`, when it keeps one.
        """
        timesteps = getattr(scheduler, "timesteps", None)
        if not isinstance(timesteps, torch.Tensor) or timesteps.ndim != 1 or len(timesteps) == 0:
            return None
        if timesteps is not self._timesteps:
            self._begin(timesteps, scheduler)
        index = self._locate(scheduler, timesteps, timestep, hint)
        if index is None or self.stuck:
            return None
        if index < self._index:
            self._begin(timesteps, scheduler)
        self._index = index
        if self._start is None or (self._provisional and index > self._start):
            self._settle(scheduler, index)
        start = self._start or 0
        return View(
            run=self.run,
            step=max(index - start, 0),
            steps=len(self._values) - start,
            source="scheduler",
            timestep=self._values[index] if index < len(self._values) else None,
            sigma=self._sigmas[index] if index < len(self._sigmas) else None,
            noise=self._noise.values[index] if index < len(self._noise.values) else None,
            noise_source=self._noise.source,
        )

    def changed(self, scheduler: Any) -> bool:
        """True when the scheduler was set up again or advanced since the last view."""
        if getattr(scheduler, "timesteps", None) is not self._timesteps:
            return True
        index = _step_index(scheduler)
        return index is not None and index != self._index

    def _begin(self, timesteps: torch.Tensor, scheduler: Any) -> None:
        self.run += 1
        self.stuck = False
        self._timesteps = timesteps
        self._values = timesteps.detach().float().tolist()
        sigmas = getattr(scheduler, "sigmas", None)
        is_tensor = isinstance(sigmas, torch.Tensor) and sigmas.ndim == 1
        self._sigmas = sigmas.detach().float().tolist() if is_tensor and sigmas is not None else []
        self._noise = noise_levels(scheduler, self._values)
        self._index = 0
        self._start = None
        self._provisional = False

    def _locate(
        self, scheduler: Any, timesteps: torch.Tensor, timestep: torch.Tensor | None, hint: torch.Tensor | None
    ) -> int | None:
        if hasattr(scheduler, "step_index"):
            index = _step_index(scheduler)
            if index is not None:
                return min(index, len(timesteps) - 1)
            for candidate in (timestep, hint):
                offset = _offset_in(candidate, timesteps)
                if offset is not None:
                    return offset
            return _begin_index(scheduler) or 0
        for candidate in (timestep, hint):
            offset = _offset_in(candidate, timesteps)
            if offset is not None:
                return offset
        return None

    def _settle(self, scheduler: Any, index: int) -> None:
        """Fix the first executed entry: image-to-image runs start in the middle of the list."""
        begin = _begin_index(scheduler)
        if begin is not None:
            self._start, self._provisional = min(begin, index), False
        elif self._provisional:
            self._start, self._provisional = (index - 1 if index > 1 else 0), False
        else:
            self._start = index
            self._provisional = hasattr(scheduler, "step_index") and _step_index(scheduler) is None and index == 0


@dataclass
class BareClock:
    """Follows a bare denoiser by the value of its timestep; per-token timesteps count by their maximum."""

    run: int = -1
    step: int = 0
    _value: float | None = None
    _top: float = 0.0
    _direction: int = 0
    _seen: set[str] = field(default_factory=set)
    _aborted: bool = False

    def read(self, value: float | None, branch: str | None) -> View:
        """The current view.

        Args:
            value: timestep of this call as a number; None when the denoiser takes none.
            branch: the guidance branch that this call's conditioning belongs to, None when it is new; a branch that
                comes again with the same timestep starts the next step.
        """
        if self.run < 0 or self._aborted:
            self._begin(value)
        elif value is not None and self._value is not None and value != self._value:
            direction = 1 if value > self._value else -1
            if self._direction and direction != self._direction:
                self._begin(value)
            else:
                self._direction = direction
                self._advance(value)
        elif branch in self._seen:
            self._advance(value)
        self._top = max(self._top, value or 0.0)
        scale = TimeScale(self._top, self._direction > 0) if self._direction else None
        return View(self.run, self.step, None, "timestep", timestep=value, scale=scale)

    def take_over(self, value: float | None, seen: set[str]) -> int:
        """Go on from the first step of a run whose scheduler turned out to stand still; returns the run's number."""
        self._begin(value)
        self._seen = seen
        return self.run

    def saw(self, branch: str) -> None:
        """Record that `branch` was called in the current step."""
        self._seen.add(branch)

    def abort(self) -> None:
        """The next call begins a new run."""
        self._aborted = True

    def _begin(self, value: float | None) -> None:
        self.run += 1
        self.step, self._value, self._direction, self._seen, self._aborted = 0, value, 0, set(), False
        self._top = value or 0.0

    def _advance(self, value: float | None) -> None:
        self.step += 1
        self._value, self._seen = value, set()


def calling_pipeline() -> Any | None:
    """The pipeline whose `__call__` is running in this thread, found on the call stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__call__" and frame.f_code.co_varnames[:1] == ("self",):
            names = frame.f_locals
            owner = names.get("self")
            if sys.version_info < (3, 13):
                names.clear()  # the snapshot would keep the caller's tensors alive until it returns
            if hasattr(owner, "scheduler") and _has_components(owner):
                return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _has_components(owner: Any) -> bool:
    """Looked up without running diffusers' property, which inspects signatures."""
    return hasattr(type(owner), "components") or "components" in getattr(owner, "__dict__", ())


def _step_index(scheduler: Any) -> int | None:
    index = getattr(scheduler, "step_index", None)
    return None if index is None else int(index)


def _begin_index(scheduler: Any) -> int | None:
    index = getattr(scheduler, "begin_index", None)
    return None if index is None else int(index)


def _offset_in(tensor: Any, timesteps: torch.Tensor) -> int | None:
    """Position of a tensor that is a view of one entry of `timesteps`."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != timesteps.dtype or tensor.device != timesteps.device:
        return None
    if tensor.numel() == 0 or any(
        stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        return None
    if tensor.untyped_storage().data_ptr() != timesteps.untyped_storage().data_ptr():
        return None
    offset = tensor.storage_offset() - timesteps.storage_offset()
    step = timesteps.stride(0) or 1
    return offset // step if 0 <= offset < len(timesteps) * step else None
