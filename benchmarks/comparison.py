"""Samples of many methods beside each other: at equal speed, with intervals, against fewer steps, as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.samples import Sample

SPEEDS = (2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Point:
    """All pictures of one setting.

    Attributes:
        speedup: median over the pictures.
        mean, low: mean and 5th percentile of PSNR, dB.
    """

    family: str
    setting: str
    peer: bool
    speedup: float
    mean: float
    low: float


def points(samples: Sequence[Sample]) -> list[Point]:
    """One point per setting."""
    groups: dict[tuple[str, str, bool], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.family, sample.setting, sample.peer), []).append(sample)
    return [
        Point(
            family,
            setting,
            peer,
            statistics.median(item.speedup for item in group),
            float(np.mean([item.psnr for item in group])),
            float(np.percentile([item.psnr for item in group], 5)),
        )
        for (family, setting, peer), group in groups.items()
    ]


def at_speed(curve: Sequence[Point], speedup: float, figure: str) -> float:
    """A family's PSNR at a speed-up, linear between its two nearest settings; NaN where it does not get that fast.

    A setting that is both faster and better than another takes its place.
    """
    kept: list[Point] = []
    for point in sorted(curve, key=lambda item: -item.speedup):
        if not kept or getattr(point, figure) > getattr(kept[-1], figure):
            kept.append(point)
    kept.reverse()
    if not kept or speedup > kept[-1].speedup:
        return float("nan")
    return float(np.interp(speedup, [p.speedup for p in kept], [getattr(p, figure) for p in kept]))


def bootstrap(values: Sequence[float], figure: Any, rounds: int = 1000) -> tuple[float, float]:
    """95 % interval of a figure by resampling."""
    rng, data = np.random.default_rng(0), np.asarray(values)
    found = [figure(data[rng.integers(0, len(data), len(data))]) for _ in range(rounds)]
    return float(np.percentile(found, 2.5)), float(np.percentile(found, 97.5))


def table(samples: Sequence[Sample]) -> str:
    """Markdown: mean and 5th percentile of every family at the speeds, then every setting with intervals."""
    found = points(samples)
    families = list(dict.fromkeys(point.family for point in found))
    lines = ["| PSNR dB, mean (5th percentile) | " + " | ".join(f"{speed:g}x" for speed in SPEEDS) + " |"]
    lines.append("|---|" + "---|" * len(SPEEDS))
    for family in families:
        curve = [point for point in found if point.family == family]
        cells = []
        for speed in SPEEDS:
            mean, low = (at_speed(curve, speed, figure) for figure in ("mean", "low"))
            cells.append("-" if np.isnan(mean) else f"{mean:.1f} ({low:.1f})")
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    lines += ["", "| setting | speed-up | calls / computed | PSNR mean [95 %] | 5th percentile [95 %] | SSIM |"]
    lines.append("|---|---|---|---|---|---|")
    for point in sorted(found, key=lambda item: (families.index(item.family), item.speedup)):
        group = [s for s in samples if (s.family, s.setting) == (point.family, point.setting)]
        values = [sample.psnr for sample in group]
        around_mean, around_low = bootstrap(values, np.mean), bootstrap(values, lambda data: np.percentile(data, 5))
        computes = [sample.compute for sample in group if sample.compute is not None]
        compute = f"{statistics.fmean(computes):.2f}" if computes else ""
        lines.append(
            f"| {point.family}, {point.setting} | {point.speedup:.2f} | {compute} "
            f"| {point.mean:.1f} [{around_mean[0]:.1f}, {around_mean[1]:.1f}] "
            f"| {point.low:.1f} [{around_low[0]:.1f}, {around_low[1]:.1f}] "
            f"| {statistics.fmean(sample.ssim for sample in group):.4f} |"
        )
    return "\n".join(lines) + "\n"


def against_peers(samples: Sequence[Sample], family: str = "cachekit schedule") -> dict[str, dict[str, Any]]:
    """Speed-up -> PSNR of a family and of the best peer there, by mean and by 5th percentile; None = not as fast."""
    found = points(samples)
    curves = {name: [point for point in found if point.family == name] for name in {point.family for point in found}}
    peers = sorted(name for name, curve in curves.items() if curve[0].peer)

    def read(name: str, speed: float, figure: str) -> float | None:
        value = at_speed(curves.get(name, ()), speed, figure)
        return None if np.isnan(value) else value

    rows: dict[str, dict[str, Any]] = {}
    for speed in SPEEDS:
        row = rows[f"{speed:g}x"] = {}
        for figure in ("mean", "low"):
            rivals = {peer: value for peer in peers if (value := read(peer, speed, figure)) is not None}
            best = max(rivals, key=lambda peer: rivals[peer]) if rivals else None
            row[figure] = read(family, speed, figure)
            row[f"best peer by {figure}"] = best
            row[f"{figure} of the best peer"] = rivals[best] if best else None
    return rows


def better_than_fewer_steps(samples: Sequence[Sample]) -> dict[str, int]:
    """Setting of our schedule -> number of pictures on which it is above fewer steps at equal or more time."""
    control = [sample for sample in samples if sample.family == "fewer steps"]
    found: dict[str, int] = {}
    for setting in dict.fromkeys(s.setting for s in samples if s.family == "cachekit schedule"):
        mine = [s for s in samples if s.family == "cachekit schedule" and s.setting == setting]
        speed = statistics.median(sample.speedup for sample in mine)
        rivals = [p for p in points(control) if p.speedup <= speed]
        if rivals:
            rival = max(rivals, key=lambda point: point.speedup)
            theirs = {(s.prompt, s.seed): s.psnr for s in control if s.setting == rival.setting}
            found[f"{setting} against {rival.setting}"] = sum(s.psnr > theirs[s.prompt, s.seed] for s in mine)
    return found


def plot(samples: Sequence[Sample], path: Path) -> None:
    """Speed-up against mean PSNR, one line per family; peers dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    found = points(samples)
    for family in dict.fromkeys(point.family for point in found):
        curve = sorted((p for p in found if p.family == family), key=lambda p: p.speedup)
        style = "--" if curve[0].peer else ":" if family == "fewer steps" else "-"
        axes.plot([p.speedup for p in curve], [p.mean for p in curve], style, marker="o", markersize=4, label=family)
    axes.set_xlabel("speed-up of the denoising loop")
    axes.set_ylabel("PSNR to the uncached picture, dB")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
