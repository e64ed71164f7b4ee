"""What TextKV saves where there is much text: `python -m benchmarks.text_kv`.

A Wan transformer with random weights on 256 image tokens and 512 text tokens, guided by two calls a step. Variants take
turns within one run, and the outputs are compared bit by bit.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

import cachekit
from benchmarks.figures import CLOCKS, Figure, figure, interleaved, render


@dataclass(frozen=True)
class Size:
    """Width and depth of the model, tokens of text, tokens a side of the image, steps, rounds; and the clock."""

    heads: int
    layers: int
    text_tokens: int
    side: int
    steps: int
    rounds: int
    clock: str = "wall"


FULL = Size(heads=8, layers=8, text_tokens=512, side=16, steps=20, rounds=7)
QUICK = Size(heads=2, layers=2, text_tokens=64, side=4, steps=6, rounds=2)
TEXT_WIDTH, HEAD_DIM, CHANNELS = 1024, 64, 16


def model(size: Size) -> WanTransformer3DModel:
    """A Wan transformer of width `heads` * 64 with seeded random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=size.heads,
            attention_head_dim=HEAD_DIM,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            text_dim=TEXT_WIDTH,
            freq_dim=256,
            ffn_dim=4 * size.heads * HEAD_DIM,
            num_layers=size.layers,
        )
    return made.eval().requires_grad_(False)


@torch.no_grad()
def sample(denoiser: Any, size: Size) -> list[torch.Tensor]:
    """`steps` steps of two calls on moving latents; returns all outputs."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, CHANNELS, 1, 2 * size.side, 2 * size.side, generator=generator)
    prompts = torch.randn(2, size.text_tokens, TEXT_WIDTH, generator=generator).split(1)
    outputs = []
    for step in range(size.steps):
        timestep = torch.tensor([1000.0 * (1 - step / size.steps)])
        for prompt in prompts:
            outputs.append(denoiser(latents * (1 - step / size.steps), timestep, prompt, return_dict=False)[0])
    return outputs


def flops(call: Callable[[], object]) -> int:
    """Floating-point operations of everything that a call computes."""
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def measure(size: Size) -> list[Figure]:
    """Time and work with and without TextKV."""
    denoiser: Any = model(size)
    loop = partial(sample, denoiser, size)
    base, total = loop(), flops(loop)
    plain, cached = interleaved(denoiser, loop, (None, cachekit.TextKVCacheConfig()), size.rounds, size.clock)
    with cachekit.cached(denoiser, "text_kv"):
        loop()
        equal = all(torch.equal(a, b) for a, b in zip(loop(), base, strict=True))
        run = cachekit.stats(denoiser).last
    assert run is not None
    show = partial(figure, f"{size.text_tokens} text tokens, {size.side**2} image tokens")
    work = total / (total - run.flops_saved)
    return [
        show("uncached call", [1e3 * a.seconds / (2 * size.steps) for a in plain], "ms"),
        show(
            "speed-up of a run, tracing included",
            [a.seconds / b.seconds for a, b in zip(plain, cached, strict=True)],
            "x",
        ),
        show("work ratio of a later run", [work], "x"),
        show("projections reused in it", [run.projections_reused], ""),
        show("work saved in it", [run.flops_saved / 1e9], "GFLOP"),
        show("held for both branches", [run.peak_bytes / 2**20], "MiB"),
        show("outputs that differ by a bit", [0.0 if equal else 1.0], "", 0.0),
    ]


def main() -> int:
    """Parse the command line, measure, print; returns 1 when an output differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.text_kv", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="cpu: time of this process")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    size = replace(QUICK if options.quick else FULL, clock=options.clock)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cachekit.CacheWarning)
        figures = measure(size)
    Console().print(render(figures))
    return int(not all(item.passes for item in figures))


if __name__ == "__main__":
    raise SystemExit(main())
