"""Timing by turns, and figures with a budget."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import diffusers
from rich import box
from rich.table import Table

import cachekit

Loop = Callable[[], object]
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


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
class Timing:
    """One timed loop: seconds by the chosen clock and on the wall, and the cache's statistics (zeros without one)."""

    seconds: float
    wall: float
    own_seconds: float = 0.0
    calls: int = 0
    computed: int = 0


def timed(
    pipe: diffusers.FluxPipeline, loop: Loop, config: cachekit.CacheConfig | None, clock: str, learn: Loop | None
) -> Timing:
    """Time one loop, with a cache that is enabled before and disabled after; `learn` runs in between, untimed."""
    with nullcontext() if config is None else cachekit.cached(pipe, config, progress=False):
        if learn is not None and config is not None:
            learn()
        wall, started = time.perf_counter(), CLOCKS[clock]()
        loop()
        seconds, wall = CLOCKS[clock]() - started, time.perf_counter() - wall
        stats = cachekit.stats(pipe)
    return Timing(seconds, wall, stats.overhead_seconds, stats.calls, stats.computed)


def interleaved(
    pipe: diffusers.FluxPipeline,
    loop: Loop,
    configs: Sequence[cachekit.CacheConfig | None],
    rounds: int,
    clock: str,
    learn: Loop | None = None,
) -> list[list[Timing]]:
    """`rounds` timings of every variant after one warm-up round; in each round every variant has its turn.

    A cache learns the model's layout in the first computed call after it was enabled. With `learn`, a short loop, that
    happens before the timed one.
    """
    measured: list[list[Timing]] = [[] for _ in configs]
    for number in range(rounds + 1):
        for timings, config in zip(measured, configs, strict=True):
            timing = timed(pipe, loop, config, clock, learn)
            if number:
                timings.append(timing)
    return measured


def figure(
    group: str, name: str, values: Sequence[float], unit: str, budget: float | None = None, at_most: bool = True
) -> Figure:
    """The figure of a list of rounds."""
    return Figure(group, name, statistics.median(values), min(values), max(values), unit, budget, at_most)


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
