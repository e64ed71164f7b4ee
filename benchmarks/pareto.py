"""Fidelity at equal speed: our calibrated schedule, our other caches, the peers and simply fewer steps, in one run.

`python -m benchmarks.pareto --out DIR` calibrates on some prompts, draws others with every method from the same noise
and writes one JSON line per picture, a table and a plot. Times are those of the denoising loop: prompts are encoded
before, pictures decoded after.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from rich.console import Console
from tqdm.auto import tqdm

import cachekit
from benchmarks.methods import Method, fewer_steps, our_methods
from benchmarks.peers import cache_dit_methods, diffusers_methods
from cachekit import zoo
from cachekit.calibration.identity import identify
from cachekit.metrics import psnr, ssim

GUIDANCE: dict[str, Any] = {"true_cfg_scale": 3.0}
SPEEDS = (2.0, 3.0, 4.0, 6.0)
IDENTICAL = 100.0
"""What a picture that equals the uncached one counts for, dB."""


@dataclass(frozen=True)
class Sample:
    """One picture of one method.

    Attributes:
        speedup: time of the uncached loop for this picture / time of this loop.
        compute: denoiser calls uncached / computed, where the method tells; else None.
    """

    family: str
    setting: str
    peer: bool
    prompt: str
    seed: int
    seconds: float
    speedup: float
    compute: float | None
    psnr: float
    ssim: float


@dataclass(frozen=True)
class Prompt:
    """A prompt with its embeddings, so that encoding is not timed."""

    text: str
    arguments: dict[str, Any]


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


def encode(pipe: Any, text: str) -> Prompt:
    """Embeddings of a prompt and of the empty negative prompt."""
    with torch.no_grad():
        embeds, pooled, _ = pipe.encode_prompt(text, None)
        negative, negative_pooled, _ = pipe.encode_prompt("", None)
    arguments = {
        "prompt_embeds": embeds,
        "pooled_prompt_embeds": pooled,
        "negative_prompt_embeds": negative,
        "negative_pooled_prompt_embeds": negative_pooled,
    }
    return Prompt(text, arguments)


def draw(pipe: Any, prompt: Prompt, seed: int, steps: int) -> tuple[torch.Tensor, float]:
    """The picture (3, H, W) in [0, 1] and the seconds of the denoising loop."""
    generator = torch.Generator().manual_seed(seed)
    started = time.perf_counter()
    latents = pipe(
        **prompt.arguments, num_inference_steps=steps, generator=generator, output_type="latent", **GUIDANCE
    ).images
    seconds = time.perf_counter() - started
    size = pipe.default_sample_size * pipe.vae_scale_factor
    latents = pipe._unpack_latents(latents, size, size, pipe.vae_scale_factor)
    latents = latents / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
    with torch.no_grad():
        image = pipe.vae.decode(latents, return_dict=False)[0]
    return (image[0].float() / 2 + 0.5).clamp(0, 1), seconds


def measure(
    pipes: Mapping[str, Any], methods: Sequence[Method], prompts: Sequence[Prompt], seeds: Sequence[int], steps: int
) -> Iterable[Sample]:
    """Every method on every prompt and seed; the methods take turns. A method that fails is left out with its error.

    `pipes` holds a pipeline with the same weights for every project.
    """
    failed: dict[str, str] = {}
    total = len(prompts) * len(seeds) * len(methods)
    with tqdm(total=total, unit="picture") as bar:
        for prompt in prompts:
            for seed in seeds:
                base, base_seconds = draw(pipes["cachekit"], prompt, seed, steps)
                for method in methods:
                    bar.update()
                    if method.key in failed:
                        continue
                    try:
                        yield _sample(pipes[method.project], method, prompt, seed, base, base_seconds)
                    except Exception as error:
                        failed[method.key] = f"{type(error).__name__}: {error}"
                        tqdm.write(f"{method.key}: {failed[method.key]}")


def _sample(pipe: Any, method: Method, prompt: Prompt, seed: int, base: torch.Tensor, base_seconds: float) -> Sample:
    with method.enable(pipe) as handle:
        image, seconds = draw(pipe, prompt, seed, method.steps)
        compute = None
        if isinstance(handle, cachekit.Handle):
            stats = handle.stats()
            compute = stats.calls / max(stats.computed, 1)
    return Sample(
        method.family,
        method.setting,
        method.peer,
        prompt.text,
        seed,
        seconds,
        base_seconds / seconds,
        compute,
        min(psnr(base, image), IDENTICAL),
        ssim(base, image),
    )


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


def main() -> int:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pareto", description=__doc__)
    parser.add_argument("--pipeline", default="emoji-flux", help="an embedded Flux pipeline")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="existing or new folder for the results")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--calibration", type=int, default=32, help="number of calibration prompts")
    parser.add_argument("--held-out", type=int, default=64, help="number of prompts that are drawn")
    parser.add_argument("--evaluations", type=int, default=12, help="further schedules that are run per budget")
    parser.add_argument("--seeds", type=int, default=2, help="number of noises per prompt")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--no-peers", action="store_true", help="leave out diffusers' hooks and cache-dit")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", cachekit.CacheWarning)
    pipe = zoo.load(options.pipeline)
    pipe.set_progress_bar_config(disable=True)
    texts = list(zoo.prompts(options.pipeline))
    random.Random(0).shuffle(texts)
    known, held_out = texts[: options.calibration], texts[options.calibration :][: options.held_out]
    budgets = sorted(
        {max(2, round(options.steps / factor)) for factor in (1.6, 2, 2.35, 2.8, 3.1, 3.5, 4, 4.7, 5.6, 7)}
    )
    began = time.perf_counter()
    profile = cachekit.calibrate(
        pipe,
        known,
        options.steps,
        budgets=budgets,
        held_back=0.0,
        evaluations=options.evaluations,
        resume=options.out / "profile.safetensors",
        negative_prompt="",
        **GUIDANCE,
    )
    calibration_seconds = time.perf_counter() - began
    profile.save(options.out / "profile.safetensors")
    generator = torch.Generator().manual_seed(0)
    ratios = cachekit.calibrate_magnitudes(
        pipe, known[:8], options.steps, negative_prompt="", generator=generator, output_type="latent", **GUIDANCE
    )
    methods = [Method("uncached again", "noise floor", options.steps, nullcontext)]
    methods += [*our_methods(options.steps, profile, ratios, budgets), *fewer_steps(options.steps)]
    if not options.no_peers:
        methods += [*diffusers_methods(options.steps, ratios), *cache_dit_methods(options.steps)]
    pipes = {method.project: pipe for method in methods}
    for project in pipes.keys() - {"cachekit"}:
        pipes[project] = zoo.load(options.pipeline)
        pipes[project].set_progress_bar_config(disable=True)
    samples = []
    with (options.out / "samples.jsonl").open("w", encoding="utf-8") as file:
        prompts = [encode(pipe, text) for text in held_out]
        for sample in measure(pipes, methods, prompts, range(options.seeds), options.steps):
            samples.append(sample)
            file.write(json.dumps(asdict(sample)) + "\n")
            file.flush()
    report = table(samples)
    (options.out / "table.md").write_text(report, encoding="utf-8")
    plot(samples, options.out / "pareto.png")
    told = identify(pipe, options.steps, (), GUIDANCE, held_out)
    about = {
        "calibration_seconds": calibration_seconds,
        "above_fewer_steps": better_than_fewer_steps(samples),
        "pictures": len(held_out) * options.seeds,
        "machine": {"machine": platform.machine(), "python": platform.python_version(), "threads": options.threads},
        "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__, "cachekit": cachekit.__version__},
        "scheduler": told.scheduler,
    }
    (options.out / "about.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    Console().print(report, highlight=False, soft_wrap=True)
    Console().print(json.dumps(about, indent=2), highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
