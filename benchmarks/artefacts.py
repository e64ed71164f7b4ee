"""Artefacts of a UNet: built in one process, run in another, beside eager and beside `torch.compile`.

    python -m benchmarks.artefacts                       # a Stable Diffusion pipeline of random weights
    python -m benchmarks.artefacts --kinds trace         # one kind only

For each kind one process draws with the denoiser itself, builds the artefact and saves it. Another process that never
builds the denoiser loads the file into the stock pipeline and draws the same pictures; their PSNR to the first ones has
to reach 60 dB. Times are taken in that second process too: denoiser, artefact and, with `--compile`, the compiled
denoiser take turns, and the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 60.0
"""PSNR in dB between pictures drawn with an artefact and those drawn with the denoiser."""
KINDS = ("trace", "export", "aot")
ABSENT: dict[str, Any] = dict.fromkeys(
    ("text_encoder", "tokenizer", "safety_checker", "feature_extractor", "image_encoder")
)
SIZES: dict[str, tuple[int, ...]] = {"tiny": (8, 16), "small": (64, 96, 128)}


def build_pipeline(folder: Path, size: str) -> None:
    """Write a Stable Diffusion pipeline of random weights; it is called with embeddings, so it has no text encoder."""
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    widths = SIZES[size]
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(16, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
    )
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=widths,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",) * (len(widths) - 1) + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * (len(widths) - 1),
        norm_num_groups=8,
        attention_head_dim=4,
        cross_attention_dim=64,
    )
    # Velocity, since a random model does not predict the noise and latents would grow without bound.
    scheduler = DDIMScheduler(
        beta_schedule="scaled_linear", prediction_type="v_prediction", steps_offset=1, clip_sample=False
    )
    pipe = StableDiffusionPipeline(vae=vae, unet=unet, scheduler=scheduler, requires_safety_checker=False, **ABSENT)
    pipe.save_pretrained(folder)


def load_pipeline(folder: Path, **components: Any) -> Any:
    """The pipeline from the folder, without progress bars."""
    from diffusers import StableDiffusionPipeline

    pipe: Any = StableDiffusionPipeline.from_pretrained(folder, **(ABSENT | components))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def arguments(steps: int, seed: int = 1) -> dict[str, Any]:
    """What the pipeline is called with, in every process the same."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        "prompt_embeds": torch.randn(1, 16, 64, generator=generator),
        "negative_prompt_embeds": torch.randn(1, 16, 64, generator=generator),
        "num_inference_steps": steps,
        "guidance_scale": 3.0,
        "generator": generator,
        "output_type": "pt",
    }


def builder(folder: Path, kind: str, steps: int) -> dict[str, Any]:
    """First process: draw with the denoiser, build the artefact, save both."""
    from safetensors.torch import save_file

    from recipes import artefacts

    pipe = load_pipeline(folder / "pipe")
    save_file({"images": pipe(**arguments(steps)).images.contiguous()}, folder / f"{kind}.images")
    given = arguments(2)
    del given["num_inference_steps"], given["output_type"]
    begin = time.perf_counter()
    file = artefacts.build(pipe, kind, **given).save(folder / f"{kind}{'.pt' if kind == 'trace' else '.pt2'}")
    return {"build": time.perf_counter() - begin, "bytes": file.stat().st_size, "file": file.name}


def runner(folder: Path, kind: str, file: str, steps: int, repeats: int, compiled: bool) -> dict[str, Any]:
    """Second process: draw with the artefact, then time it against the denoiser."""
    import torch
    from safetensors.torch import load_file

    from cachekit.metrics import psnr
    from recipes import artefacts

    pipe = load_pipeline(folder / "pipe", unet=None)
    begin = time.perf_counter()
    artefacts.install(pipe, folder / file)
    loaded = time.perf_counter() - begin
    images = pipe(**arguments(steps)).images
    fidelity = psnr(load_file(folder / f"{kind}.images")["images"], images)
    others = {"eager": load_pipeline(folder / "pipe")}
    if compiled:
        others["compile"] = load_pipeline(folder / "pipe")
        others["compile"].unet.compile()
    begin = time.perf_counter()
    for other in others.values():
        other(**arguments(2))
    first = time.perf_counter() - begin
    medians = times({"artefact": pipe} | others, steps, repeats)
    ratios = {name: medians["artefact"] / value for name, value in medians.items() if name != "artefact"}
    return {
        "psnr": fidelity,
        "load": loaded,
        "ratios": ratios,
        "medians": medians,
        "first": first,
        "threads": torch.get_num_threads(),
    }


def times(pipes: dict[str, Any], steps: int, repeats: int) -> dict[str, float]:
    """Median seconds of one denoiser call, by taking turns."""
    import torch

    unets: dict[str, Callable[..., Any]] = {name: pipe.unet for name, pipe in pipes.items()}
    generator = torch.Generator().manual_seed(2)
    inputs = (
        torch.randn(2, 4, 16, 16, generator=generator),
        torch.tensor(500),
        torch.randn(2, 16, 64, generator=generator),
    )
    taken: dict[str, list[float]] = {name: [] for name in unets}
    with torch.no_grad():
        for turn in range(repeats + 3):
            for name, unet in unets.items():
                begin = time.perf_counter()
                unet(*inputs, return_dict=False)
                if turn >= 3:
                    taken[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in taken.items()}


def in_a_process(*options: str) -> dict[str, Any]:
    """One part of the benchmark in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.artefacts", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(options)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(folder: Path, chosen: argparse.Namespace) -> tuple[str, bool]:
    """The table, and whether every artefact draws the denoiser's pictures."""
    import torch

    build_pipeline(folder / "pipe", chosen.size)
    shared = ("--folder", str(folder), "--steps", str(chosen.steps), "--repeats", str(chosen.repeats))
    rows, passed, threads = [], True, 0
    for kind in chosen.kinds:
        made = in_a_process("--part", "build", "--kind", kind, *shared)
        more = ("--compile",) if chosen.compile else ()
        ran = in_a_process("--part", "run", "--kind", kind, "--file", made["file"], *shared, *more)
        passed, threads = passed and ran["psnr"] >= LIMIT, ran["threads"]
        cells = [kind, f"{made['build']:.1f} s", f"{made['bytes'] / 2**20:.1f} MiB", f"{ran['load']:.2f} s"]
        cells += [
            f"{ran['psnr']:.1f} dB",
            f"{1000 * ran['medians']['artefact']:.1f} ms",
            f"{ran['ratios']['eager']:.2f}",
        ]
        if chosen.compile:
            cells.append(f"{ran['ratios']['compile']:.2f}")
        rows.append("| " + " | ".join(cells) + " |")
    head = ["kind", "build", "file", "load", "PSNR to eager", "one call", "time / eager"]
    head += ["time / compiled"] if chosen.compile else []
    lines = [
        f"UNet of widths {SIZES[chosen.size]}, batch 2, 16x16 latents, {chosen.steps} steps, median of "
        f"{chosen.repeats}, {threads} thread(s), torch {torch.__version__}",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *rows,
        "",
        f"PSNR >= {LIMIT:.0f} dB: {'yes' if passed else 'NO'}",
    ]
    return "\n".join(lines), passed


def main(given: list[str] | None = None) -> int:
    """Entry point; 1 when an artefact draws other pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--size", choices=SIZES, default="small", help="of the UNet")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="time `unet.compile()` too")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("build", "run"), help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    chosen = parser.parse_args(given)
    if chosen.part == "build":
        sys.stdout.write(json.dumps(builder(chosen.folder, chosen.kind, chosen.steps)))
        return 0
    if chosen.part == "run":
        found = runner(chosen.folder, chosen.kind, chosen.file, chosen.steps, chosen.repeats, chosen.compile)
        sys.stdout.write(json.dumps(found))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        text, passed = report(Path(temporary), chosen)
    sys.stdout.write(text + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
