"""Fidelity at equal speed: our calibrated schedule, our other caches, the peers and simply fewer steps, in one run.

`python -m benchmarks.pareto --out DIR` calibrates on some prompts, draws others with every method from the same noise
and writes one JSON line per picture, a table and a plot. Times are those of the denoising loop: prompts are encoded
before, pictures decoded after. A run that was stopped goes on where it was; `--part 1/2` and `--part 2/2` share the
work of one folder between two processes.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from rich.console import Console

import cachekit
from benchmarks.comparison import against_peers, better_than_fewer_steps, plot, table
from benchmarks.methods import Method, fewer_steps, our_methods
from benchmarks.peers import cache_dit_methods, diffusers_methods
from benchmarks.samples import GUIDANCE, encode, measure, read, too_slow, write
from cachekit import zoo

PARTS = "samples-{part}.jsonl"


@dataclass(frozen=True)
class Part:
    """Which share of the pictures is drawn: `number` of `count`, from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """From "2/3".

        Raises:
            argparse.ArgumentTypeError: for anything else, or a number that is not between 1 and the count.
        """
        number, _, count = text.partition("/")
        if number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count):
            return cls(int(number), int(count))
        raise argparse.ArgumentTypeError(f"not a part such as 1/2 or 2/2: {text}")


def calibrated(pipe: Any, options: argparse.Namespace, budgets: list[int], known: list[str]) -> cachekit.Profile:
    """The profile in the folder, or a new one that is put there."""
    path = options.out / "profile.safetensors"
    profile = cachekit.calibrate(
        pipe,
        known,
        options.steps,
        budgets=budgets,
        held_back=0.0,
        evaluations=options.evaluations,
        resume=path,
        negative_prompt="",
        **GUIDANCE,
    )
    profile.save(path)
    return profile


def report(folder: Path, about: dict[str, Any]) -> str:
    """Table, plot and the rest of the figures from all samples in a folder."""
    samples = read(folder)
    text = table(samples)
    (folder / "table.md").write_text(text, encoding="utf-8")
    plot(samples, folder / "pareto.png")
    told = {
        "pictures": len({(sample.prompt, sample.seed) for sample in samples}),
        "against_peers": against_peers(samples),
        "above_fewer_steps": better_than_fewer_steps(samples),
        **about,
    }
    (folder / "about.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return text + "\n" + json.dumps(told, indent=2)


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
    parser.add_argument(
        "--part", type=Part.parse, default=Part(1, 1), metavar="K/N", help="draw this share of the pictures only"
    )
    parser.add_argument("--slow", type=float, default=1.4, help="settings below this speed-up are drawn 16 times only")
    parser.add_argument("--report", action="store_true", help="draw nothing: tables and plot of what is in the folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", cachekit.CacheWarning)
    if not options.report:
        draw_all(options)
    about = {
        "machine": {"machine": platform.machine(), "python": platform.python_version(), "threads": options.threads},
        "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__, "cachekit": cachekit.__version__},
    }
    Console().print(report(options.out, about), highlight=False, soft_wrap=True)
    return 0


def draw_all(options: argparse.Namespace) -> None:
    """Calibrate where the folder has no profile, and draw the pictures of this part that it does not have."""
    pipe = zoo.load(options.pipeline)
    pipe.set_progress_bar_config(disable=True)
    texts = list(zoo.prompts(options.pipeline))
    random.Random(0).shuffle(texts)
    known, held_out = texts[: options.calibration], texts[options.calibration :][: options.held_out]
    budgets = sorted(
        {max(2, round(options.steps / factor)) for factor in (1.6, 2, 2.35, 2.8, 3.1, 3.5, 4, 4.7, 5.6, 7)}
    )
    profile = calibrated(pipe, options, budgets, known)
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
    part = options.part
    prompts = [encode(pipe, text) for text in held_out[part.number - 1 :: part.count]]
    path = options.out / PARTS.format(part=part.number)
    drop = too_slow(options.slow, after=-(-16 // part.count))
    write(measure(pipes, methods, prompts, range(options.seeds), options.steps, read(options.out), drop), path)


if __name__ == "__main__":
    raise SystemExit(main())
