"""Memory and time of the mode "disk": one denoising step of a Flux of random weights, in processes of their own.

    python -m benchmarks.disk_offload            # builds 2.3 GiB of weights in a temporary folder once
    python -m benchmarks.disk_offload --folder /data/random-flux   # keeps them for the next time

Three processes run the same step: with all weights in memory, with `offload.load(folder, "disk")`, and the latter
without prefetch. Memory is the kernel's peak of the resident set since the process began (VmHWM) minus the resident set
after all imports; the files' pages in the operating system's cache belong to no process and can be dropped at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMIT = 0.35
"""Peak above the imports, as a share of the weights, that the mode must stay below."""
DOUBLE, SINGLE, HEADS, HEAD_WIDTH = 8, 20, 8, 128
ABSENT: dict[str, Any] = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
"""The run is given embeddings instead."""
MODES = ("memory", "disk", "disk without prefetch")


def build(folder: Path, double: int = DOUBLE, single: int = SINGLE, heads: int = HEADS) -> None:
    """Write a Flux pipeline of random float32 weights: real blocks, tiny text encoders and VAE."""
    import torch
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
    )
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=double,
        num_single_layers=single,
        attention_head_dim=HEAD_WIDTH,
        num_attention_heads=heads,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        axes_dims_rope=(16, 56, 56),
    )
    FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), vae=vae, transformer=transformer, **ABSENT
    ).save_pretrained(folder)


def weight_bytes(folder: Path) -> int:
    """Bytes of all weights of a saved pipeline."""
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def one_run(folder: Path, mode: str, steps: int) -> None:
    """In a process of its own: load, run, write the latents beside the weights, and say what it took as JSON."""
    import torch
    from diffusers import FluxPipeline
    from safetensors.torch import save_file

    import offload

    before = resident("VmRSS")
    begin = time.perf_counter()
    if mode == "memory":
        pipe: Any = FluxPipeline.from_pretrained(folder, **ABSENT)
    else:
        pipe = offload.load(folder, "disk", "cpu", options={"prefetch": mode == "disk"}, **ABSENT)
    pipe.set_progress_bar_config(disable=True)
    loaded = time.perf_counter()
    generator = torch.Generator().manual_seed(1)
    latents = pipe(
        prompt_embeds=torch.randn(1, 32, 64, generator=generator),
        pooled_prompt_embeds=torch.randn(1, 64, generator=generator),
        height=128,
        width=128,
        num_inference_steps=steps,
        generator=generator,
        output_type="latent",
    ).images
    done = time.perf_counter()
    save_file({"latents": latents}, folder / f"{mode.replace(' ', '-')}.latents")
    handle = offload.active(pipe)
    moved = handle.stats().moved_bytes if handle is not None else 0
    result = {"peak": resident("VmHWM") - before, "load": loaded - begin, "run": done - loaded, "moved": moved}
    sys.stdout.write(json.dumps(result))


def resident(field: str) -> int:
    """A line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel does not tell {field}; this benchmark needs Linux")


def measure(folder: Path, mode: str, steps: int) -> dict[str, float]:
    """Run one mode in a fresh process."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.disk_offload",
        "--folder",
        str(folder),
        "--steps",
        str(steps),
        "--run",
        mode,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the run {mode!r} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(folder: Path, steps: int, repeats: int) -> tuple[str, bool]:
    """The table, and whether the limit was kept and all outputs are equal."""
    import torch
    from safetensors.torch import load_file

    weights = weight_bytes(folder)
    runs = {mode: [] for mode in MODES}  # type: dict[str, list[dict[str, float]]]
    for _ in range(repeats):
        for mode in MODES:
            runs[mode].append(measure(folder, mode, steps))
    best = {mode: min(run["run"] for run in found) for mode, found in runs.items()}
    latents = {mode: load_file(folder / f"{mode.replace(' ', '-')}.latents")["latents"] for mode in MODES}
    equal = all(torch.equal(latents["memory"], item) for item in latents.values())
    lines = [
        f"weights {weights / 2**30:.2f} GiB, {steps} step(s), best of {repeats}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}",
        "",
        "| mode | peak above imports | of the weights | load | run | run / memory | read in the run |",
        "|---|---|---|---|---|---|---|",
    ]
    for mode, found in runs.items():
        peak = max(run["peak"] for run in found)
        lines.append(
            f"| {mode} | {peak / 2**20:.0f} MiB | {peak / weights:.0%} | {found[0]['load']:.1f} s | {best[mode]:.2f} s "
            f"| {best[mode] / best['memory']:.2f} | {found[0]['moved'] / 2**30:.2f} GiB |"
        )
    worst = max(run["peak"] / weights for mode in MODES[1:] for run in runs[mode])
    lines += [
        "",
        f"outputs bit-identical: {'yes' if equal else 'NO'}; peak <= {LIMIT:.0%}: {'yes' if worst <= LIMIT else 'NO'}",
    ]
    return "\n".join(lines), equal and worst <= LIMIT


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 1 when an output differs or the limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the weights are kept; a temporary folder if left out")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run", choices=MODES, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.run:
        one_run(chosen.folder, chosen.run, chosen.steps)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary)
        if not (folder / "model_index.json").is_file():
            build(folder)
        text, passed = report(folder, chosen.steps, chosen.repeats)
    sys.stdout.write(text + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
