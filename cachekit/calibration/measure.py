"""Draws prompts with a setting and compares with the uncached pictures: fidelity, work and time."""

from __future__ import annotations

import inspect
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from cachekit.api import Handle, cached, is_cache_enabled
from cachekit.calibration.prompts import require_pipeline
from cachekit.calibration.work import counted
from cachekit.engine.discovery import find_denoisers
from cachekit.engine.stats import Stats
from cachekit.errors import CacheConflictError, CacheWarning, UnsupportedModelError
from cachekit.strategies import CacheConfig, ScheduleCacheConfig

By = Literal["work", "calls", "time"]
Prompt = str | Mapping[str, Any]

IDENTICAL = 100.0
"""What a picture that equals the uncached one counts for, dB. The other end is 0, which NaN counts for."""

_EVERYTHING = ScheduleCacheConfig(tuple(range(10_000)))
"""Computes every step: bit-identical to uncached, and tells how many there are."""
_OURS = ("generator", "num_inference_steps", "prompt")
_SLACK = 1e-3


@dataclass(frozen=True)
class Setting:
    """What is drawn with.

    Attributes:
        name: of the strategy, or of the control.
        value: of the number that is turned.
        label: the setting in a few words.
        steps: `num_inference_steps` of the pipeline.
        config: None draws without a cache.
    """

    name: str
    value: float
    label: str
    steps: int
    config: CacheConfig | None


@dataclass(frozen=True)
class Picture:
    """One prompt.

    Attributes:
        psnr: dB to the uncached picture, within 0 and 100.
        seconds: of the whole pipeline call, prompt encoding and decoding included.
        speedup: seconds of the uncached call / seconds.
        calls: denoiser calls that the pipeline made.
        computed: those that were computed, at least in part.
    """

    psnr: float
    seconds: float
    speedup: float
    calls: int
    computed: int


@dataclass(frozen=True)
class Measured:
    """All pictures of one setting.

    Attributes:
        uncached_calls: denoiser calls of the uncached pipeline.
        reuse_cost: what a reused call costs in floating-point operations; a computed one costs 1.
        reasons: why calls were computed, the most frequent reason first.
    """

    setting: Setting
    pictures: tuple[Picture, ...]
    uncached_calls: int
    reuse_cost: float
    reasons: tuple[str, ...] = ()

    @property
    def calls(self) -> float:
        """Mean number of denoiser calls of a picture."""
        return statistics.fmean(picture.calls for picture in self.pictures)

    @property
    def computed(self) -> float:
        """Mean number of computed calls of a picture."""
        return statistics.fmean(picture.computed for picture in self.pictures)

    @property
    def skips(self) -> bool:
        """False when not a single call was reused."""
        return any(picture.computed < picture.calls for picture in self.pictures)

    @property
    def skips_or_shortens(self) -> bool:
        """False when all that the uncached pipeline computes was computed."""
        return self.computed < self.uncached_calls

    def speedup(self, by: By = "work") -> float:
        """How much faster than the uncached pipeline, as the mean picture goes.

        Args:
            by: "work" compares floating-point operations of the denoisers, "calls" their computed calls, "time" the
                seconds of the whole call (the median).
        """
        if by == "time":
            return statistics.median(picture.speedup for picture in self.pictures)
        reused = self.reuse_cost * (self.calls - self.computed) if by == "work" else 0.0
        return self.uncached_calls / max(self.computed + reused, 1e-9)

    @cached_property
    def mean(self) -> float:
        """Mean PSNR, dB."""
        return statistics.fmean(picture.psnr for picture in self.pictures)

    @cached_property
    def low(self) -> float:
        """5th percentile of PSNR, dB."""
        return float(np.percentile([picture.psnr for picture in self.pictures], 5))

    @cached_property
    def worst(self) -> float:
        """Smallest PSNR, dB."""
        return min(picture.psnr for picture in self.pictures)

    def to_dict(self) -> dict[str, Any]:
        """Figures as plain values."""
        return {
            "strategy": self.setting.name,
            "setting": self.setting.label,
            "value": self.setting.value,
            "config": None if self.setting.config is None else str(self.setting.config),
            "num_inference_steps": self.setting.steps,
            "calls": self.calls,
            "computed": self.computed,
            "reuse_cost": self.reuse_cost,
            "speedup": {by: self.speedup(by) for by in ("work", "calls", "time")},
            "psnr": {"mean": self.mean, "low": self.low, "worst": self.worst},
            "pictures": [vars(picture) for picture in self.pictures],
        }


class Bench:
    """Prompts with their uncached pictures, each from its own noise.

    Args:
        pipe: a diffusers pipeline without an enabled cache.
        prompts: texts, or what the pipeline is called with for one picture (`{"prompt": ..., "image": ...}`).
        steps: `num_inference_steps` of the uncached pictures.
        seed: prompt i starts from the noise of seed + i.
        arguments: what else the pipeline is called with.

    Attributes:
        pictures: True when the pipeline gives pictures in [0, 1]; else fidelity is that of whatever it gives (latents,
            sound), with the range of the uncached result as the peak.
        calls: denoiser calls of an uncached picture.
        scheduler_steps: entries of the scheduler that a run goes through.

    Raises:
        TypeError: not a pipeline, or one that does not return tensors.
        ValueError: no prompts, an argument that is set here, or an uncached result that is not finite.
        CacheConflictError: a cache is enabled.
    """

    def __init__(
        self, pipe: Any, prompts: Sequence[Prompt], steps: int, seed: int, arguments: Mapping[str, Any]
    ) -> None:
        require_pipeline(pipe)
        if not prompts:
            raise ValueError("prompts is empty; give some of the kind that will be drawn")
        if steps < 1:
            raise ValueError(f"num_inference_steps: a whole number of at least 1, got {steps!r}")
        own = {name for prompt in prompts if isinstance(prompt, Mapping) for name in prompt} - {"prompt"}
        taken = sorted(set(_OURS) & (own | set(arguments)))
        if taken:
            raise ValueError(f"{', '.join(taken)} cannot be passed on; prompts, steps and seed say it")
        if arguments.get("output_type") == "pil":
            raise ValueError('output_type="pil" gives 8-bit pictures; leave it out to compare floats')
        if not find_denoisers(pipe):
            raise UnsupportedModelError(f"{type(pipe).__name__} has no denoiser (a component that takes a timestep)")
        if is_cache_enabled(pipe):
            raise CacheConflictError("a cache is enabled on this pipeline; call cachekit.disable_cache(pipe) first")
        self.pipe, self.steps = pipe, steps
        self._prompts, self._seed, self._arguments = list(prompts), seed, dict(arguments)
        self._accepts = _accepted(pipe)
        if self._accepts is not None and "prompt" not in self._accepts and any(isinstance(p, str) for p in prompts):
            raise TypeError(f"{type(pipe).__name__} takes no prompt; pass dicts of what it takes instead of texts")
        self._reference = Setting("uncached", steps, "uncached", steps, None)
        self._call(0, min(steps, 2))
        with self._enabled(Setting("uncached", steps, "uncached", steps, _EVERYTHING)) as handle:
            assert handle is not None
            with counted(find_denoisers(pipe).values()) as work:
                first = self._call(0, steps)
            runs = [item.last for item in handle.stats().denoisers.values() if item.last is not None]
        if not work.calls:
            raise UnsupportedModelError("the pipeline called none of its denoisers, so there is nothing to save")
        self.calls, self._flops = work.calls, work.flops
        self.scheduler_steps = max((run.steps or len(run.computed_steps()) for run in runs), default=work.calls)
        drawn = [self._timed(self._reference, index)[:2] for index in range(len(prompts))]
        self._uncached = [result for result, _ in drawn]
        self._seconds = [seconds for _, seconds in drawn]
        if not all(bool(torch.isfinite(result).all()) for result in self._uncached):
            raise ValueError("the uncached pipeline gives NaN or infinity, so that nothing can be compared with it")
        self.pictures = arguments.get("output_type") != "latent" and all(_is_picture(item) for item in self._uncached)
        spans = [1.0 if self.pictures else float(item.max() - item.min()) for item in self._uncached]
        self._peaks = [span or 1.0 for span in spans]
        self.repeats = torch.equal(first, self._uncached[0])

    def __len__(self) -> int:
        return len(self._prompts)

    def measure(
        self, *settings: Setting, retime: bool = False, advance: Callable[[], Any] | None = None
    ) -> list[Measured]:
        """Draw every prompt with every setting; the settings take turns.

        Args:
            settings: what to draw with.
            retime: let the uncached pipeline take its turn, so that a change of the machine's speed meets all.
            advance: called after every picture.

        Raises:
            CacheKitError, ValueError, TypeError: a config cannot be used on this pipeline.
        """
        drawn: list[list[Picture]] = [[] for _ in settings]
        reasons: list[dict[str, int]] = [{} for _ in settings]
        found = [self._count(setting) for setting in settings]
        for index in range(len(self)):
            base = self._timed(self._reference, index)[1] if retime else self._seconds[index]
            for which, setting in enumerate(settings):
                result, seconds, stats = self._timed(setting, index)
                calls = found[which][0]
                computed = calls - (0 if stats is None else stats.reused)
                _tally(stats, reasons[which])
                fidelity = self._psnr(index, result)
                drawn[which].append(Picture(fidelity, seconds, base / seconds, calls, computed))
                if advance is not None:
                    advance()
        return [
            Measured(setting, tuple(pictures), self.calls, cost, tuple(sorted(why, key=lambda item: -why[item])))
            for setting, pictures, (_, cost), why in zip(settings, drawn, found, reasons, strict=True)
        ]

    def magnitudes(self, config: CacheConfig, samples: int) -> dict[str, tuple[float, ...]]:
        """Branch -> magnitude ratios of the uncached pipeline, from a config that records them."""
        curves: dict[str, list[list[float]]] = {}
        setting = Setting("calibration", 0, "calibration", self.steps, config)
        for index in range(min(samples, len(self))):
            stats = self._timed(setting, index)[2]
            for branch, curve in ({} if stats is None else stats.magnitude_ratios).items():
                curves.setdefault(branch, []).append(curve)
        return {
            branch: tuple(np.exp(np.log(np.array(measured)).mean(0)).tolist()) for branch, measured in curves.items()
        }

    def _count(self, setting: Setting) -> tuple[int, float]:
        """Denoiser calls of the first prompt, and what a reused one costs."""
        with self._enabled(setting) as handle:
            with counted(find_denoisers(self.pipe).values()) as work:
                self._call(0, setting.steps)
            stats = None if handle is None else handle.stats()
        if stats is None:
            return work.calls, 0.0
        if not stats.reused or not self._flops:
            return self.calls, 0.0
        in_full_calls = work.flops / self._flops * self.calls
        return self.calls, max(in_full_calls - (self.calls - stats.reused), 0.0) / stats.reused

    def _timed(self, setting: Setting, index: int) -> tuple[torch.Tensor, float, Stats | None]:
        with self._enabled(setting) as handle:
            started = time.perf_counter()
            result = self._call(index, setting.steps)
            seconds = time.perf_counter() - started
            return result, seconds, None if handle is None else handle.stats()

    @contextmanager
    def _enabled(self, setting: Setting) -> Iterator[Handle | None]:
        """Cached or not; that a trial skips nothing is no warning to anybody."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)
            if setting.config is None:
                yield None
                return
            with cached(self.pipe, setting.config, progress=False) as handle:
                yield handle

    def _call(self, index: int, steps: int) -> torch.Tensor:
        """What the pipeline gives for one prompt, float32 on the CPU."""
        prompt = self._prompts[index]
        told: dict[str, Any] = {"output_type": "pt", **self._arguments, "num_inference_steps": steps}
        told |= {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
        seed = (self._seed + index) % 2**32
        told["generator"] = torch.Generator().manual_seed(seed)
        for name in {"output_type", "generator"} - self._arguments.keys():
            if self._accepts is not None and name not in self._accepts:
                del told[name]
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            return _tensor(self.pipe(**told))

    def _psnr(self, index: int, result: torch.Tensor) -> float:
        """10 log10(peak^2 / mean square error), within 0 and `IDENTICAL`; 0 for what is not finite."""
        before = self._uncached[index]
        if before.shape != result.shape:
            raise ValueError(
                f"with another setting the pipeline gave {tuple(result.shape)} instead of {tuple(before.shape)}"
            )
        if self.pictures:
            result = result.clamp(0, 1)
        error = float(((before.double() - result.double()) ** 2).mean()) / self._peaks[index] ** 2
        if not math.isfinite(error):
            return 0.0
        return IDENTICAL if error <= 10 ** (-IDENTICAL / 10) else max(-10 * math.log10(error), 0.0)


def _accepted(pipe: Any) -> frozenset[str] | None:
    """Parameters of the pipeline's call; None when it takes any."""
    parameters = inspect.signature(type(pipe).__call__).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def _tensor(output: Any) -> torch.Tensor:
    """The result of a pipeline call as one float32 tensor on the CPU."""
    value = output if isinstance(output, (torch.Tensor, np.ndarray)) else None
    if value is None and hasattr(output, "__getitem__"):
        value = output[0]
    if (
        isinstance(value, (list, tuple))
        and value
        and all(isinstance(item, (torch.Tensor, np.ndarray)) for item in value)
    ):
        value = torch.stack([torch.as_tensor(item) for item in value])
    if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.number):
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"the pipeline gave {type(output).__name__}, in which there is no tensor to compare; pass "
            f'output_type="latent" or "np" (of a modular pipeline also output="images")'
        )
    return value.detach().float().cpu()


def _is_picture(result: torch.Tensor) -> bool:
    return result.ndim >= 3 and float(result.min()) >= -_SLACK and float(result.max()) <= 1 + _SLACK


def _tally(stats: Stats | None, reasons: dict[str, int]) -> None:
    for item in () if stats is None else stats.denoisers.values():
        for decision in () if item.last is None else item.last.decisions:
            if not decision.reused:
                reasons[decision.reason] = reasons.get(decision.reason, 0) + 1
