"""What the engine costs, and whether skipped work turns into time: `python -m benchmarks.overhead`.

All figures are ratios within one run; variants take turns (A B C A B C ...) and medians of the rounds are shown.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import diffusers
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import cachekit
from benchmarks.models import flux, no_op_flux, pipeline, sample

STEP = 0.1
"""The budgets refer to steps of at least this many seconds."""

Loop = Callable[[], object]


@dataclass(frozen=True)
class Figure:
    """One measured figure and its budget.

    Attributes:
        value, low, high: median, smallest and largest of the rounds.
        budget: bound of the median, above or below as `at_most` says; None for a figure that is only shown.
    """

    group: str
    name: str
    value: float
    low: float
    high: float
    unit: str
    budget: float | None = None
    at_most: bool = True

    @property
    def passes(self) -> bool:
        """True when the budget is kept, or there is none."""
        if self.budget is None:
            return True
        return self.value <= self.budget if self.at_most else self.value >= self.budget


@dataclass(frozen=True)
class Size:
    """How much is measured: tokens a side, blocks, heads, steps, rounds."""

    tokens: int
    layers: int
    single_layers: int
    heads: int
    steps: int
    rounds: int


FULL = Size(tokens=16, layers=4, single_layers=8, heads=10, steps=28, rounds=5)
QUICK = Size(tokens=4, layers=2, single_layers=4, heads=2, steps=8, rounds=2)


@dataclass(frozen=True)
class Timing:
    """One timed loop: seconds, and what the statistics of the cache say about it (zeros without a cache)."""

    seconds: float
    own_seconds: float = 0.0
    calls: int = 0
    computed: int = 0


def timed(pipe: diffusers.FluxPipeline, loop: Loop, config: cachekit.CacheConfig | None) -> Timing:
    """Time one loop, with a cache that is enabled before and disabled after."""
    with nullcontext() if config is None else cachekit.cached(pipe, config, progress=False):
        started = time.perf_counter()
        loop()
        seconds = time.perf_counter() - started
        stats = cachekit.stats(pipe)
    return Timing(seconds, stats.overhead_seconds, stats.calls, stats.computed)


def interleaved(
    pipe: diffusers.FluxPipeline, loop: Loop, configs: Sequence[cachekit.CacheConfig | None], rounds: int
) -> list[list[Timing]]:
    """`rounds` timings of every variant after one warm-up round; in each round every variant has its turn."""
    measured: list[list[Timing]] = [[] for _ in configs]
    for number in range(rounds + 1):
        for timings, config in zip(measured, configs, strict=True):
            timing = timed(pipe, loop, config)
            if number:
                timings.append(timing)
    return measured


def figure(
    group: str, name: str, values: Sequence[float], unit: str, budget: float | None = None, at_most: bool = True
) -> Figure:
    """The figure of a list of rounds."""
    return Figure(group, name, statistics.median(values), min(values), max(values), unit, budget, at_most)


def no_op_overhead(size: Size) -> list[Figure]:
    """FirstBlock that never reuses: own timers, wall clock, and a stack of blocks that do nothing."""
    never = cachekit.FirstBlockCacheConfig(threshold=0.0)
    pipe = pipeline(flux(size.layers, size.single_layers, size.heads))
    plain, cached = interleaved(pipe, partial(sample, pipe, size.steps, size.tokens), (None, never), size.rounds)
    hollow = pipeline(no_op_flux())
    bare, hooked = interleaved(hollow, partial(sample, hollow, size.steps, 4), (None, never), 2 * size.rounds)
    (first,) = interleaved(hollow, partial(sample, hollow, 1, 4), (never,), 2 * size.rounds)
    group = "nothing skipped"
    later = [(b.own_seconds - a.own_seconds) / (size.steps - 1) for a, b in zip(first, hooked, strict=True)]
    extra = [(b.seconds - a.seconds) / size.steps for a, b in zip(bare, hooked, strict=True)]
    return [
        figure(group, "uncached step", [1e3 * a.seconds / size.steps for a in plain], "ms"),
        figure(group, "own timers / loop", [100 * b.own_seconds / b.seconds for b in cached], "%", 1.0),
        figure(
            group,
            "wall clock, cached / uncached - 1",
            [100 * (b.seconds / a.seconds - 1) for a, b in zip(plain, cached, strict=True)],
            "%",
            1.0,
        ),
        figure(group, "57 no-op blocks, wall clock a step", [1e3 * seconds for seconds in extra], "ms"),
        figure(group, "the same, of a step of 100 ms", [100 * seconds / STEP for seconds in extra], "%", 1.0),
        figure(group, "own timers, first step of a run", [1e3 * a.own_seconds for a in first], "ms"),
        figure(group, "own timers, each later step", [1e3 * seconds for seconds in later], "ms"),
    ]


def skipping(size: Size) -> list[Figure]:
    """Loop speed-up over (calls / computed calls); a reuse of FirstBlock counts as its first block."""
    pipe = pipeline(flux(size.layers, size.single_layers, size.heads))
    loop = partial(sample, pipe, size.steps, size.tokens)
    probe, outside = shares(pipe.transformer, loop)
    configs = {
        "FirstBlock": cachekit.FirstBlockCacheConfig(threshold=_threshold(pipe, loop)),
        "MagCache": cachekit.MagCacheConfig(mag_ratios=cachekit.FLUX_MAG_RATIOS),
        "TaylorSeer": cachekit.TaylorSeerCacheConfig(cache_interval=3),
    }
    plain, *cached = interleaved(pipe, loop, (None, *configs.values()), size.rounds)
    group = "skipped work"
    figures = [
        figure(group, "first block, share of a call", [100 * probe], "%"),
        figure(group, "outside of the blocks, share of a call", [100 * outside], "%"),
    ]
    for name, timings in zip(configs, cached, strict=True):
        counts = timings[0]
        reused = counts.calls - counts.computed
        effective = counts.computed + (reused * probe if name == "FirstBlock" else 0.0)
        speed_ups = [a.seconds / b.seconds for a, b in zip(plain, timings, strict=True)]
        turned = [speed_up / (counts.calls / effective) for speed_up in speed_ups]
        figures.append(figure(group, f"{name}, {counts.computed} of {counts.calls} computed: speed-up", speed_ups, "x"))
        figures.append(figure(group, f"{name}: speed-up / work ratio", turned, "", 0.97, at_most=False))
    return figures


def held_state(size: Size) -> list[Figure]:
    """Peak bytes of a guided run, by branch, in units of what the block lists return."""
    model = flux(2, 4, heads=2)
    pipe = pipeline(model)
    loop = partial(sample, pipe, max(size.steps // 2, 8), 8, guided=True)
    delta = delta_bytes(model, loop)
    configs: list[tuple[str, cachekit.CacheConfig, float]] = [
        ("FirstBlock", cachekit.FirstBlockCacheConfig(threshold=_threshold(pipe, loop)), 2.0),
        ("MagCache", cachekit.MagCacheConfig(mag_ratios=cachekit.FLUX_MAG_RATIOS), 1.0),
    ]
    configs += [
        (f"TaylorSeer, order {n}", cachekit.TaylorSeerCacheConfig(cache_interval=2, max_order=n), n + 1.0)
        for n in (1, 2)
    ]
    figures = []
    for name, config, budget in configs:
        with cachekit.cached(pipe, config, progress=False):
            loop()
            stats = cachekit.stats(pipe)
        branches = len(stats.last.branches) if stats.last is not None else 1
        figures.append(figure("state held", name, [stats.peak_bytes / branches / delta], "deltas", budget))
    return figures


def shares(model: nn.Module, loop: Loop) -> tuple[float, float]:
    """Shares of a denoiser call: the first block, and everything outside of the blocks (medians over a loop)."""
    first = model.transformer_blocks[0]
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    started: dict[nn.Module, float] = {}
    spent: dict[nn.Module, list[float]] = {}

    def enter(module: nn.Module, args: object) -> None:
        started[module] = time.perf_counter()

    def leave(module: nn.Module, args: object, output: object) -> None:
        spent.setdefault(module, []).append(time.perf_counter() - started[module])

    hooks = [hook for module in (model, *blocks) for hook in _hooks(module, enter, leave)]
    try:
        loop()
    finally:
        for hook in hooks:
            hook.remove()
    medians = {module: statistics.median(seconds) for module, seconds in spent.items()}
    inside = sum(medians[block] for block in blocks)
    return medians[first] / medians[model], max(0.0, 1 - inside / medians[model])


def delta_bytes(model: nn.Module, loop: Loop) -> int:
    """Bytes that the block lists return in one denoiser call."""
    sizes: dict[nn.Module, int] = {}

    def leave(module: nn.Module, args: object, output: tuple[torch.Tensor, ...]) -> None:
        sizes[module] = sum(part.nbytes for part in output)

    lists = (model.transformer_blocks, model.single_transformer_blocks)
    hooks = [blocks[-1].register_forward_hook(leave) for blocks in lists]
    try:
        loop()
    finally:
        for hook in hooks:
            hook.remove()
    return sum(sizes.values())


def measure(size: Size) -> list[Figure]:
    """All figures."""
    with torch.inference_mode(False), warnings.catch_warnings():
        warnings.simplefilter("ignore", cachekit.CacheWarning)
        return [*no_op_overhead(size), *skipping(size), *held_state(size)]


def render(figures: Sequence[Figure]) -> Table:
    """Figures with their budgets."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, caption="median of the rounds (smallest .. largest)")
    table.add_column("")
    for name in ("measured", "rounds", "budget", ""):
        table.add_column(name, justify="right", no_wrap=True)
    group = None
    for item in figures:
        if item.group != group:
            group = item.group
            table.add_row(f"[bold]{group}[/bold]")
        sign = "<=" if item.at_most else ">="
        budget = "" if item.budget is None else f"{sign} {item.budget:g}"
        verdict = "" if item.budget is None else "[green]pass[/green]" if item.passes else "[red]fail[/red]"
        spread = "" if item.low == item.high else f"({item.low:.2f} .. {item.high:.2f})"
        table.add_row(f" {item.name}", f"{item.value:.2f} {item.unit}", spread, budget, verdict)
    return table


def main() -> int:
    """Parse the command line, measure, print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds; budgets mean little then")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a budget is exceeded")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = measure(QUICK if options.quick else FULL)
    Console().print(render(figures))
    if options.json is not None:
        versions = {"cachekit": cachekit.__version__, "torch": torch.__version__, "diffusers": diffusers.__version__}
        machine = {"python": platform.python_version(), "machine": platform.machine(), "threads": options.threads}
        rows = [asdict(item) | {"passes": item.passes} for item in figures]
        document = {"versions": versions, "machine": machine, "quick": options.quick, "figures": rows}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return int(options.check and not all(item.passes for item in figures))


def _threshold(pipe: diffusers.FluxPipeline, loop: Loop) -> float:
    """A threshold that lets about half of the calls be skipped on random weights: twice the median drift of a step."""
    with cachekit.cached(pipe, cachekit.FirstBlockCacheConfig(threshold=0.0), progress=False):
        loop()
        run = cachekit.stats(pipe).last
    assert run is not None
    return 2 * statistics.median(item.score for item in run.decisions if item.score is not None)


def _hooks(
    module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]
) -> list[torch.utils.hooks.RemovableHandle]:
    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


if __name__ == "__main__":
    raise SystemExit(main())
