"""What the engine costs, and whether skipped work turns into time: `python -m benchmarks.overhead`.

All figures are ratios within one run; variants take turns (A B C A B C ...) and medians of the rounds are shown.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from rich.console import Console
from torch import nn

import cachekit
from benchmarks.figures import CLOCKS, Figure, Loop, figure, interleaved, render
from benchmarks.models import flux, no_op_flux, pipeline, sample

STEP = 0.1
"""The budgets refer to steps of at least this many seconds."""


@dataclass(frozen=True)
class Size:
    """How much is measured: tokens a side, blocks, heads, steps, rounds; and with which clock."""

    tokens: int
    layers: int
    single_layers: int
    heads: int
    steps: int
    rounds: int
    clock: str = "wall"


FULL = Size(tokens=16, layers=4, single_layers=8, heads=6, steps=28, rounds=7)
QUICK = Size(tokens=4, layers=2, single_layers=4, heads=2, steps=8, rounds=2)


def no_op_overhead(size: Size) -> list[Figure]:
    """FirstBlock that never reuses: own timers, the clock, and a stack of blocks that do nothing."""
    never, steps, rounds = cachekit.FirstBlockCacheConfig(threshold=0.0), size.steps, size.rounds
    pipe, hollow = pipeline(flux(size.layers, size.single_layers, size.heads)), pipeline(no_op_flux())
    loop, empty = partial(sample, pipe, steps, size.tokens), partial(sample, hollow, steps, size.tokens)
    learn, short = partial(sample, pipe, 1, size.tokens), partial(sample, hollow, 1, size.tokens)
    plain, cached = interleaved(pipe, loop, (None, never), rounds, size.clock, learn)
    (new,) = interleaved(pipe, learn, (never,), rounds, size.clock)
    bare, hooked = interleaved(hollow, empty, (None, never), 2 * rounds, size.clock, short)
    whole = [100 * (b.seconds / a.seconds - 1) for a, b in zip(plain, cached, strict=True)]
    extra = [(b.seconds - a.seconds) / steps for a, b in zip(bare, hooked, strict=True)]
    show = partial(figure, "nothing skipped")
    return [
        show("uncached step", [1e3 * a.seconds / steps for a in plain], "ms"),
        show("own timers / loop", [100 * b.own_seconds / b.wall for b in cached], "%", 1.0),
        show("cached / uncached - 1", whole, "%"),
        show("57 no-op blocks: added a step", [1e3 * seconds for seconds in extra], "ms"),
        show("  of a step of 100 ms", [100 * seconds / STEP for seconds in extra], "%", 1.0),
        show("learning a model, once", [1e3 * a.own_seconds for a in new], "ms"),
    ]


def skipping(size: Size) -> list[Figure]:
    """Loop speed-up over (calls / computed calls); a reuse of FirstBlock counts as its first block."""
    pipe = pipeline(flux(size.layers, size.single_layers, size.heads))
    loop = partial(sample, pipe, size.steps, size.tokens)
    probe, outside = shares(pipe.transformer, loop, CLOCKS[size.clock])
    configs = {
        "FirstBlock": cachekit.FirstBlockCacheConfig(threshold=_threshold(pipe, loop)),
        "MagCache": cachekit.MagCacheConfig(mag_ratios=cachekit.FLUX_MAG_RATIOS),
        "TaylorSeer": cachekit.TaylorSeerCacheConfig(cache_interval=3),
        "Schedule": cachekit.ScheduleCacheConfig(range(0, size.steps, 2)),
    }
    learn = partial(sample, pipe, 1, size.tokens)
    plain, *cached = interleaved(pipe, loop, (None, *configs.values()), size.rounds, size.clock, learn)
    show = partial(figure, "skipped work")
    figures = [
        show("first block, share of a call", [100 * probe], "%"),
        show("outside of the blocks, share of a call", [100 * outside], "%"),
    ]
    for name, timings in zip(configs, cached, strict=True):
        counts = timings[0]
        reused = counts.calls - counts.computed
        effective = counts.computed + (reused * probe if name == "FirstBlock" else 0.0)
        speed_ups = [a.seconds / b.seconds for a, b in zip(plain, timings, strict=True)]
        turned = [speed_up / (counts.calls / effective) for speed_up in speed_ups]
        figures.append(show(f"{name}, {counts.computed} of {counts.calls} computed", speed_ups, "x"))
        goal = 0.97 if name in ("FirstBlock", "Schedule") else None
        figures.append(show("  speed-up / work ratio", turned, "", goal, at_most=False))
        idle = 0.0 if name == "Schedule" else outside
        figures.append(show("  ceiling set by the work outside", [effective / (effective + reused * idle)], ""))
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


def shares(model: Any, loop: Loop, clock: Callable[[], float]) -> tuple[float, float]:
    """Shares of the time in the denoiser: the first block, and everything outside of the blocks."""
    blocks: list[nn.Module] = [*model.transformer_blocks, *model.single_transformer_blocks]
    started: dict[nn.Module, float] = {}
    spent: dict[nn.Module, float] = {}

    def enter(module: nn.Module, args: object) -> None:
        started[module] = clock()

    def leave(module: nn.Module, args: object, output: object) -> None:
        spent[module] = spent.get(module, 0.0) + clock() - started[module]

    hooks = [module.register_forward_pre_hook(enter) for module in (model, *blocks)]
    hooks += [module.register_forward_hook(leave) for module in (model, *blocks)]
    _run_hooked(loop, hooks)
    return spent[blocks[0]] / spent[model], 1 - sum(spent[block] for block in blocks) / spent[model]


def delta_bytes(model: Any, loop: Loop) -> int:
    """Bytes that the block lists return in one denoiser call."""
    sizes: dict[nn.Module, int] = {}

    def leave(module: nn.Module, args: object, output: tuple[torch.Tensor, ...]) -> None:
        sizes[module] = sum(part.nbytes for part in output)

    lists = (model.transformer_blocks, model.single_transformer_blocks)
    _run_hooked(loop, [blocks[-1].register_forward_hook(leave) for blocks in lists])
    return sum(sizes.values())


def _run_hooked(loop: Loop, hooks: Sequence[Any]) -> None:
    try:
        loop()
    finally:
        for hook in hooks:
            hook.remove()


def measure(size: Size) -> list[Figure]:
    """All figures."""
    with torch.inference_mode(False), warnings.catch_warnings():
        warnings.simplefilter("ignore", cachekit.CacheWarning)
        return [*no_op_overhead(size), *skipping(size), *held_state(size)]


def main() -> int:
    """Parse the command line, measure, print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds; budgets mean little then")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a budget is exceeded")
    parser.add_argument(
        "--clock",
        choices=sorted(CLOCKS),
        default="wall",
        help="cpu: time of this process, where others share the cores",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = measure(replace(QUICK if options.quick else FULL, clock=options.clock))
    Console().print(render(figures))
    if options.json is not None:
        document = {
            "versions": {
                "cachekit": cachekit.__version__,
                "torch": torch.__version__,
                "diffusers": diffusers.__version__,
            },
            "machine": {"python": platform.python_version(), "machine": platform.machine()},
            "settings": {"quick": options.quick, "clock": options.clock, "threads": options.threads},
            "figures": [asdict(item) | {"passes": item.passes} for item in figures],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return int(options.check and not all(item.passes for item in figures))


def _threshold(pipe: diffusers.FluxPipeline, loop: Loop) -> float:
    """A threshold that lets about half of the calls be skipped on random weights: a bit over the median drift."""
    with cachekit.cached(pipe, cachekit.FirstBlockCacheConfig(threshold=0.0), progress=False):
        loop()
        run = cachekit.stats(pipe).last
    assert run is not None
    return 1.05 * statistics.median(item.score for item in run.decisions if item.score is not None)


if __name__ == "__main__":
    raise SystemExit(main())
