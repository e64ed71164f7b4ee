"""Runs the demo: every prompt with every method from the same noise, in turn, timed and compared with uncached."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import cachekit
from cachekit.calibration.prompts import spread
from cachekit.demo.methods import GUIDANCE, Method, cache_methods, fewer_steps, uncached
from cachekit.metrics import psnr, ssim

CALIBRATION_PROMPTS = 2
SEEDS = 2**32

Advance = Callable[[str, int], None]
"""Called with what comes next and the number of pictures drawn since the last call."""


@dataclass(frozen=True)
class Sample:
    """One picture.

    Attributes:
        image: (3, H, W), floats in [0, 1], on the CPU.
        seconds: time of the whole pipeline call, decoding included.
        computed: guidance branch -> number of computed denoiser calls; without a cache "" stands for every branch.
        calls: denoiser calls of one branch.
        peak_bytes: most bytes held by the cache between two calls.
        psnr: dB against the uncached picture; infinite when identical.
        ssim: against the uncached picture.
    """

    prompt: str
    image: torch.Tensor
    seconds: float
    computed: dict[str, int]
    calls: int
    peak_bytes: int = 0
    psnr: float = float("inf")
    ssim: float = 1.0

    @property
    def share(self) -> float:
        """Part of the denoiser calls that was computed."""
        return statistics.fmean(self.computed.values()) / self.calls


@dataclass
class Result:
    """All pictures of one method, in the order of the prompts."""

    method: Method
    samples: list[Sample] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Median over the prompts."""
        return statistics.median(sample.seconds for sample in self.samples)

    @property
    def peak_bytes(self) -> int:
        return max(sample.peak_bytes for sample in self.samples)


@dataclass
class Demo:
    """What is drawn with what.

    Attributes:
        prompts: texts, one column each.
        calibration: texts on which MagCache is calibrated.
        seed: picture i starts from the noise of seed + i.
    """

    pipe: Any
    prompts: Sequence[str]
    calibration: Sequence[str]
    steps: int
    seed: int

    @property
    def pictures(self) -> int:
        """Number of pipeline calls, for a progress bar: warm-up, calibration, and five methods."""
        return 1 + len(self.calibration) + 5 * len(self.prompts)

    def run(self, advance: Advance) -> list[Result]:
        """Draw everything; the methods take turns, so that a change of the machine's speed meets all of them.

        The control gets as many steps as the caches computed on average for the first prompt.
        """
        advance("warm-up", 0)
        _draw(self.pipe, self.prompts[0], min(self.steps, 2), self.seed)
        advance("calibrating MagCache", 1)
        caches = cache_methods(self.pipe, self.calibration, self.steps, self.seed)
        advance("drawing", len(self.calibration))
        results = [Result(method) for method in (uncached(self.steps), *caches)]
        for index, prompt in enumerate(self.prompts):
            for result in results:
                advance(f"{prompt}: {result.method.name}", 0)
                reference = None if result is results[0] else results[0].samples[index]
                result.samples.append(self._sample(prompt, index, result.method, reference))
                advance(f"{prompt}: {result.method.name}", 1)
            if not index:
                share = statistics.fmean(result.samples[0].share for result in results[1:])
                control = Result(fewer_steps(max(1, round(share * self.steps))))
                control.samples.append(self._sample(prompt, index, control.method, results[0].samples[index]))
                advance(f"{prompt}: {control.method.name}", 1)
                results.append(control)
        return results

    def _sample(self, prompt: str, index: int, method: Method, reference: Sample | None) -> Sample:
        seed = (self.seed + index) % SEEDS
        with _cache(self.pipe, method):
            started = time.perf_counter()
            image = _draw(self.pipe, prompt, method.steps, seed)
            seconds = time.perf_counter() - started
            stats = cachekit.stats(self.pipe)
        run = stats.last
        computed, calls = {"": method.steps}, method.steps
        if run is not None:
            computed = {branch: len(run.computed_steps(branch)) for branch in run.branches}
            calls = max(len(run.of(branch)) for branch in run.branches)
        if reference is None:
            return Sample(prompt, image, seconds, computed, calls)
        fidelity = psnr(reference.image, image), ssim(reference.image, image)
        return Sample(prompt, image, seconds, computed, calls, stats.peak_bytes, *fidelity)


def demo(pipe: Any, prompts: Sequence[str], known: Sequence[str], steps: int, seed: int) -> Demo:
    """A demo that calibrates on `known` prompts that are not drawn."""
    held_out = [prompt for prompt in known if prompt not in prompts] or list(known)
    return Demo(pipe, prompts, spread(held_out, CALIBRATION_PROMPTS), steps, seed)


@contextlib.contextmanager
def _cache(pipe: Any, method: Method) -> Iterator[None]:
    if method.config is None:
        yield
        return
    with cachekit.cached(pipe, method.config, progress=False):
        yield


def _draw(pipe: Any, prompt: str, steps: int, seed: int) -> torch.Tensor:
    """One picture, (3, H, W) on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    output = pipe(prompt, num_inference_steps=steps, generator=generator, output_type="pt", **GUIDANCE)
    image: torch.Tensor = output.images[0].float().cpu()
    return image
