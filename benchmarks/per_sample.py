"""One decision for a batch, or one for each sample: `python -m benchmarks.per_sample`.

Two batches: different prompts through the embedded pipeline, and one sample that moves beside others that stand still.
Each with one decision for all, with one for each sample, and one by one. Variants take turns; seconds are those of
the second run after enabling, since the first one computes one call twice to see that the batch can be split.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import cachekit
from benchmarks.models import POOLED_WIDTH, TEXT_WIDTH, flux
from cachekit import zoo

PROMPTS = ("red heart", "banana", "octopus", "rocket")


@dataclass(frozen=True)
class Row:
    """One variant.

    Attributes:
        computed, samples: samples whose blocks were computed, of all.
        seconds: of each round.
        to_single, to_uncached: PSNR of the latents of every sample to its own cached and to its own uncached run.
    """

    name: str
    computed: int
    samples: int
    seconds: tuple[float, ...]
    to_single: tuple[float, ...]
    to_uncached: tuple[float, ...]


def latent_psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """PSNR in dB over the range of `b`; infinite for equal latents."""
    error = float((a - b).square().mean())
    return math.inf if not error else 10 * math.log10(float(b.max() - b.min()) ** 2 / error)


def prompts_apart(prompts: Sequence[str], steps: int, threshold: float, rounds: int) -> list[Row]:
    """A batch of different prompts through the embedded pipeline."""
    pipe = zoo.load("emoji-flux")
    pipe.set_progress_bar_config(disable=True)

    def draw(chosen: range) -> torch.Tensor:
        """Latents; the noise of a prompt depends on its position alone."""
        latents: torch.Tensor = pipe(
            [prompts[i] for i in chosen],
            num_inference_steps=steps,
            generator=[torch.Generator().manual_seed(i) for i in chosen],
            output_type="latent",
        ).images
        return latents

    return measure(pipe.transformer, draw, len(prompts), steps, threshold, rounds)


def one_moves(samples: int, steps: int, threshold: float, rounds: int) -> list[Row]:
    """A batch in which one sample is new in every step and the others stand still, on random weights.

    The time hardly advances, since with random weights it alone would change every sample.
    """
    model = flux(2, 6, heads=4)
    tokens, text = 64, 32
    inputs = torch.randn(1, samples, tokens, 16, generator=torch.Generator().manual_seed(0)).repeat(steps, 1, 1, 1)
    inputs[:, 0] = torch.randn(steps, tokens, 16, generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def sample(chosen: range) -> torch.Tensor:
        rows = slice(chosen.start, chosen.stop)
        outputs = []
        for step in range(steps):
            outputs.append(
                model(
                    hidden_states=inputs[step, rows],
                    timestep=torch.full((len(chosen),), 1 - 1e-3 * step / steps),
                    encoder_hidden_states=torch.ones(len(chosen), text, TEXT_WIDTH),
                    pooled_projections=torch.ones(len(chosen), POOLED_WIDTH),
                    img_ids=torch.zeros(tokens, 3),
                    txt_ids=torch.zeros(text, 3),
                ).sample
            )
        return torch.stack(outputs, dim=1)

    return measure(model, sample, samples, steps, threshold, rounds)


def measure(
    model: nn.Module, loop: Callable[[range], torch.Tensor], count: int, steps: int, threshold: float, rounds: int
) -> list[Row]:
    """All variants of a loop that takes the numbers of the samples to run."""

    def batch() -> torch.Tensor:
        return loop(range(count))

    def singly() -> torch.Tensor:
        return torch.cat([loop(range(i, i + 1)) for i in range(count)])

    one, each = (cachekit.FirstBlockCacheConfig(threshold, per_sample=flag) for flag in (False, True))
    variants: dict[str, tuple[Callable[[], torch.Tensor], cachekit.CacheConfig | None]] = {
        "uncached": (batch, None),
        "one decision for all": (batch, one),
        "one for each sample": (batch, each),
        "one by one": (singly, one),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    found: dict[str, tuple[torch.Tensor, int]] = {}
    for _ in range(rounds):
        for name, (run, config) in variants.items():
            with nullcontext() if config is None else cachekit.cached(model, config, progress=False):
                run()
                started = time.perf_counter()
                with counted(model.get_submodule("transformer_blocks.1")) as samples:
                    output = run()
                seconds[name].append(time.perf_counter() - started)
            found[name] = output, sum(samples)
    base, single = found["uncached"][0], found["one by one"][0]
    return [
        Row(
            name,
            computed,
            steps * count,
            tuple(seconds[name]),
            tuple(latent_psnr(a, b) for a, b in zip(output, single, strict=True)),
            tuple(latent_psnr(a, b) for a, b in zip(output, base, strict=True)),
        )
        for name, (output, computed) in found.items()
    ]


@contextmanager
def counted(block: nn.Module) -> Iterator[list[int]]:
    """Batch sizes of the calls of a block that really run."""
    sizes: list[int] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sizes.append(len(kwargs["hidden_states"]))

    hook = block.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield sizes
    finally:
        hook.remove()


def render(title: str, rows: Sequence[Row]) -> Table:
    """The variants as a table."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for name in ("", "computed", "seconds", "speed-up", "PSNR to single runs", "PSNR to uncached"):
        table.add_column(name, justify="left" if not name else "right")
    plain = statistics.median(rows[0].seconds)
    for row in rows:
        median = statistics.median(row.seconds)
        table.add_row(
            row.name,
            f"{row.computed} of {row.samples}",
            f"{median:.2f} ({min(row.seconds):.2f} .. {max(row.seconds):.2f})",
            f"{plain / median:.2f}x",
            *(
                f"{statistics.mean(values):.1f} dB (worst {min(values):.1f})"
                for values in (row.to_single, row.to_uncached)
            ),
        )
    return table


def main() -> int:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.per_sample", description=__doc__)
    parser.add_argument("--prompts", nargs="+", default=list(PROMPTS), help="what to draw, one sample each")
    parser.add_argument("--steps", type=int, default=28, help="denoising steps")
    parser.add_argument("--threshold", type=float, default=0.1, help="of FirstBlock")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each variant")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cachekit.CacheWarning)
        how = options.steps, options.threshold, options.rounds
        tables = [
            render("emoji-flux, a batch of prompts", prompts_apart(options.prompts, *how)),
            render("random weights, one of the samples moves", one_moves(len(options.prompts), *how)),
        ]
    for table in tables:
        Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
