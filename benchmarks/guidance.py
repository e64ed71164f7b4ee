"""Does the effect of guidance survive a cache? `python -m benchmarks.guidance`.

The embedded pipeline calls its denoiser twice a step. The effect is the difference of the final latents between two
guidance scales from the same noise; of a cached run it should point where that of the uncached run points, and be as
long.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import cachekit
from cachekit import demo, zoo
from cachekit.demo.drawing import caching
from cachekit.demo.methods import prepared

WEAK, STRONG = 1.5, 3.0
COSINE, RATIO = 0.9, (0.9, 1.1)
"""Bounds of the two figures."""


@dataclass
class Kept:
    """What is left of the effect, prompt by prompt: cosine with the uncached effect, and ratio of the norms."""

    method: demo.Method
    cosines: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    @property
    def passes(self) -> bool:
        return min(self.cosines) >= COSINE and RATIO[0] <= min(self.ratios) and max(self.ratios) <= RATIO[1]


def effect(pipe: Any, prompt: str, steps: int, seed: int, config: cachekit.CacheConfig | None = None) -> torch.Tensor:
    """Final latents at guidance STRONG minus those at WEAK, as one vector."""
    latents = []
    with caching(pipe, config):
        for scale in (STRONG, WEAK):
            generator = torch.Generator().manual_seed(seed)
            call = {"negative_prompt": "", "true_cfg_scale": scale, "num_inference_steps": steps}
            final: torch.Tensor = pipe(prompt, generator=generator, output_type="latent", **call).images
            latents.append(final.flatten())
    return latents[0] - latents[1]


def agreement(plain: torch.Tensor, cached: torch.Tensor) -> tuple[float, float]:
    """Cosine of the two effects, and norm of the cached one over that of the plain one."""
    return float(torch.cosine_similarity(plain, cached, dim=0)), float(cached.norm() / plain.norm())


def measure(pipe: Any, prompts: Sequence[str], known: Sequence[str], steps: int) -> list[Kept]:
    """Every strategy that brings something on `pipe`, at the settings of `cachekit demo --all`.

    Args:
        pipe: the pipeline, without a cache.
        prompts: texts to draw; number i from seed i.
        known: texts to calibrate on.
        steps: number of steps.
    """
    found = []
    for candidate in demo.EVERY:
        method = prepared(candidate, pipe, demo.spread(known, max(1, candidate.prompts)), steps, len(prompts))
        if isinstance(method, demo.Method):
            found.append(Kept(method))
    for seed, prompt in enumerate(prompts):
        plain = effect(pipe, prompt, steps, seed)
        for item in found:
            cosine, ratio = agreement(plain, effect(pipe, prompt, steps, seed, item.method.config))
            item.cosines.append(cosine)
            item.ratios.append(ratio)
    return found


def render(found: Sequence[Kept]) -> Table:
    """One row a strategy."""
    table = Table("method", "settings", "cosine, mean (worst)", "norm ratio, mean (range)", "", box=box.SIMPLE_HEAD)
    for item in found:
        ratios = f"{statistics.fmean(item.ratios):.3f} ({min(item.ratios):.3f} to {max(item.ratios):.3f})"
        cosines = f"{statistics.fmean(item.cosines):.4f} ({min(item.cosines):.4f})"
        table.add_row(item.method.name, item.method.settings, cosines, ratios, "" if item.passes else "outside")
    return table


def main() -> int:
    """Parse the command line, measure, print; returns 1 when a strategy is outside of the bounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guidance", description=__doc__)
    parser.add_argument("--prompts", type=int, default=6, help="number of prompts")
    parser.add_argument("--steps", type=int, default=28, help="denoising steps")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pipe = zoo.load("emoji-flux")
    pipe.set_progress_bar_config(disable=True)
    known = zoo.prompts("emoji-flux")
    prompts = demo.spread(known, options.prompts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cachekit.CacheWarning)
        found = measure(pipe, prompts, [prompt for prompt in known if prompt not in prompts], options.steps)
    Console().print(render(found))
    return int(not all(item.passes for item in found))


if __name__ == "__main__":
    raise SystemExit(main())
