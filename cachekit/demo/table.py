"""The demo's figures: a table to read and a JSON document to keep."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Sequence
from typing import Any

import diffusers
import torch
from rich import box
from rich.table import Table

import cachekit
from cachekit.demo.methods import NotApplicable
from cachekit.demo.runner import Result, Sample
from cachekit.engine.stats import format_bytes
from cachekit.metrics import Summary, summarise


def render(results: Sequence[Result]) -> Table:
    """One row a method; the first result is the uncached reference."""
    count = len(results[0].samples)
    caption = (
        f"{count} prompt{'s' if count != 1 else ''}; computed of all steps (cond: with the prompt, uncond: with the "
        "negative prompt); fidelity to uncached beside that of as few uncached steps as cost the same; "
        "bytes held for the next steps"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    table.add_column("method", no_wrap=True)
    for name in ("computed", "seconds\nspeed-up", "PSNR dB\n(worst)", "fewer\nsteps", "held"):
        table.add_column(name, justify="right", no_wrap=True)
    reference = results[0]
    for result in results:
        is_reference = result is reference
        method = result.method
        table.add_row(
            method.name if not method.settings else f"{method.name}\n[dim]{method.settings}[/dim]",
            computed_text(result),
            f"{result.seconds:.2f}"
            if is_reference
            else f"{result.seconds:.2f}\n{reference.seconds / result.seconds:.2f}x",
            "-" if is_reference else _psnr_text(_psnr(result)),
            "-" if result.control is None else _psnr_text(_psnr(result.control)),
            "-" if method.config is None else format_bytes(result.peak_bytes),
        )
    return table


def remarks(results: Sequence[Result], not_applicable: Sequence[NotApplicable]) -> list[str]:
    """One line each: what calibration took, what the controls stand for, and strategies that are not in the table."""
    lines = [f"{result.method.name}: {result.method.preparation}" for result in results if result.method.preparation]
    costs = [f"{result.method.name} {result.compute:.1f}" for result in results if result.compute is not None]
    if costs:
        lines.append(f"operations on the first prompt, in uncached steps, which fewer steps match: {', '.join(costs)}")
    return [*lines, *(f"not applicable: {item.name}: {item.reason}" for item in not_applicable)]


def _psnr(result: Result) -> Summary:
    return summarise(sample.psnr for sample in result.samples)


def computed_text(result: Result) -> str:
    """Computed steps of all steps, the mean over the prompts; branch by branch where they differ."""
    branches = list(dict.fromkeys(name for sample in result.samples for name in sample.computed))
    means = [statistics.fmean(sample.computed.get(name, 0) for sample in result.samples) for name in branches]
    calls = max(sample.calls for sample in result.samples)
    if len(set(means)) == 1:
        return f"{means[0]:.3g}/{calls}"
    return "\n".join(f"{name} {mean:.3g}/{calls}" for name, mean in zip(branches, means, strict=True))


def to_dict(results: Sequence[Result], not_applicable: Sequence[NotApplicable] = (), **settings: Any) -> dict[str, Any]:
    """Everything but the pictures, as JSON-ready values. A PSNR of null stands for identical pictures."""
    reference = results[0]
    versions = {"cachekit": cachekit.__version__, "torch": torch.__version__, "diffusers": diffusers.__version__}
    machine = {"python": platform.python_version(), "machine": platform.machine(), "threads": torch.get_num_threads()}
    return {
        "settings": settings,
        "versions": versions,
        "machine": machine,
        "methods": [_method_dict(result, reference) for result in results],
        "not_applicable": [{"name": item.name, "reason": item.reason} for item in not_applicable],
    }


def _method_dict(result: Result, reference: Result) -> dict[str, Any]:
    return {
        "name": result.method.name,
        "settings": result.method.settings,
        "steps": result.method.steps,
        "seconds": result.seconds,
        "speed_up": reference.seconds / result.seconds,
        "preparation": result.method.preparation,
        "compute": result.compute,
        "control_steps": None if result.control is None else result.control.method.steps,
        "psnr": _summary_dict(_psnr(result)),
        "ssim": _summary_dict(summarise(sample.ssim for sample in result.samples)),
        "peak_bytes": result.peak_bytes,
        "samples": [_sample_dict(sample) for sample in result.samples],
    }


def _sample_dict(sample: Sample) -> dict[str, Any]:
    return {
        "prompt": sample.prompt,
        "seconds": sample.seconds,
        "computed": sample.computed,
        "calls_per_branch": sample.calls,
        "psnr": _finite(sample.psnr),
        "ssim": sample.ssim,
        "peak_bytes": sample.peak_bytes,
    }


def _summary_dict(summary: Summary) -> dict[str, Any]:
    return {"mean": _finite(summary.mean), "worst": _finite(summary.worst), "identical": summary.identical}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _psnr_text(summary: Summary) -> str:
    if summary.identical == summary.count:
        return "equal"
    text = f"{summary.mean:.1f}\n({summary.worst:.1f})"
    return text if not summary.identical else f"{text}\n{summary.identical} equal"
