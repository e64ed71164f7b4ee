"""Runs the demo: every prompt with every method from the same noise, in turn, timed and compared with uncached."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import cachekit
from cachekit.calibration.prompts import spread
from cachekit.demo.compute import StepCost, flops
from cachekit.demo.drawing import caching, draw
from cachekit.demo.methods import EVERY, SHORT, Candidate, Method, NotApplicable, fewer_steps, prepared, uncached
from cachekit.metrics import psnr, ssim

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


@dataclass
class Result:
    """All pictures of one method, in the order of the prompts.

    Attributes:
        compute: uncached steps that cost as many operations as the method on the first prompt.
        control: the uncached run with about that many steps; None for one that is uncached, or that skips too little.
    """

    method: Method
    samples: list[Sample] = field(default_factory=list)
    compute: float | None = None
    control: Result | None = None

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
        calibration: texts to calibrate on.
        seed: picture i starts from the noise of seed + i.
        candidates: the strategies.
        not_applicable: the strategies that bring nothing on this pipeline, known after `run`.
    """

    pipe: Any
    prompts: Sequence[str]
    calibration: Sequence[str]
    steps: int
    seed: int
    candidates: Sequence[Candidate] = SHORT
    not_applicable: list[NotApplicable] = field(default_factory=list)
    _rows: int | None = None

    @property
    def pictures(self) -> int:
        """Number of pipeline calls, for a progress bar; an estimate until the strategies are prepared."""
        count = len(self.candidates)
        rows = self._rows or 1 + 2 * count
        return 1 + sum(map(self._measures_on, self.candidates)) + count + rows * len(self.prompts)

    def run(self, advance: Advance) -> list[Result]:
        """Draw everything; the methods take turns, so that a change of the machine's speed meets all of them."""
        self.not_applicable.clear()
        advance("warm-up", 0)
        cost = StepCost.of(self.pipe, self.prompts[0], self.seed)
        advance("warm-up", 1)
        results = [Result(uncached(self.steps)), *self._cached(cost, advance)]
        results += self._controls(results[1:])
        self._rows = len(results)
        for index, prompt in enumerate(self.prompts):
            for result in results:
                advance(f"{prompt}: {result.method.name}", 0)
                reference = None if result is results[0] else results[0].samples[index]
                result.samples.append(self._sample(prompt, index, result.method, reference))
                advance(f"{prompt}: {result.method.name}", 1)
        return results

    def _cached(self, cost: StepCost, advance: Advance) -> list[Result]:
        """The strategies that bring something, and what they cost on the first prompt."""
        found = []
        for candidate in self.candidates:
            prompts = spread(self.calibration, max(1, candidate.prompts))
            advance(f"{'calibrating' if candidate.prompts else 'preparing'} {candidate.name}", 0)
            method = prepared(candidate, self.pipe, prompts, self.steps, self.seed)
            advance(f"counting {candidate.name}", self._measures_on(candidate))
            if isinstance(method, NotApplicable):
                self.not_applicable.append(method)
            else:
                count = flops(self.pipe, self.prompts[0], self.steps, self.seed, method.config)
                found.append(Result(method, compute=cost.steps(count)))
            advance(f"counting {candidate.name}", 1)
        return found

    def _controls(self, results: Sequence[Result]) -> list[Result]:
        """Uncached runs with about as much to compute, the shortest first; methods that cost the same share one.

        A method that skips too little for that has none.
        """
        counts = [max(1, round(result.compute or 0.0)) for result in results]
        controls = {count: Result(fewer_steps(count)) for count in sorted(set(counts)) if count < self.steps}
        for result, count in zip(results, counts, strict=True):
            result.control = controls.get(count)
        return list(controls.values())

    def _measures_on(self, candidate: Candidate) -> int:
        return min(candidate.prompts, len(self.calibration))

    def _sample(self, prompt: str, index: int, method: Method, reference: Sample | None) -> Sample:
        seed = (self.seed + index) % SEEDS
        with caching(self.pipe, method.config):
            started = time.perf_counter()
            image = draw(self.pipe, prompt, method.steps, seed)
            seconds = time.perf_counter() - started
            stats = cachekit.stats(self.pipe)
        run = stats.last
        computed, calls = {"": method.steps}, method.steps
        if run is not None:
            computed = {branch: len(run.computed_steps(branch)) for branch in run.branches}
            calls = max(len({decision.call for decision in run.of(branch)}) for branch in run.branches)
        if reference is None:
            return Sample(prompt, image, seconds, computed, calls)
        fidelity = psnr(reference.image, image), ssim(reference.image, image)
        return Sample(prompt, image, seconds, computed, calls, stats.peak_bytes, *fidelity)


def demo(
    pipe: Any, prompts: Sequence[str], known: Sequence[str], steps: int, seed: int, *, every: bool = False
) -> Demo:
    """A demo that calibrates on `known` prompts that are not drawn.

    Args:
        pipe: the pipeline, without a cache.
        prompts: texts to draw.
        known: texts that the pipeline knows.
        steps: number of steps.
        seed: of the noise of the first picture.
        every: draw with every strategy, not only the first three.
    """
    held_out = [prompt for prompt in known if prompt not in prompts] or list(known)
    return Demo(pipe, prompts, held_out, steps, seed, EVERY if every else SHORT)
