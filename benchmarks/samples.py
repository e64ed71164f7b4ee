"""Pictures of many methods from the same noise, timed in turn, one JSON line each; a rerun draws what is missing."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

import cachekit
from benchmarks.methods import Method
from cachekit.metrics import psnr, ssim

GUIDANCE: dict[str, Any] = {"true_cfg_scale": 3.0}
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

    @property
    def key(self) -> str:
        return f"{self.family} | {self.setting}"


@dataclass(frozen=True)
class Prompt:
    """A prompt with its embeddings, so that encoding is not timed."""

    text: str
    arguments: dict[str, Any]


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
    pipes: Mapping[str, Any],
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    steps: int,
    known: Sequence[Sample] = (),
    drop: Callable[[Method, Sequence[Sample]], bool] = lambda method, samples: False,
) -> Iterator[Sample]:
    """Every method on every prompt and seed; the methods take turns. A method that fails is left out with its error.

    Args:
        pipes: a pipeline with the same weights for every project.
        known: samples of an earlier run, which are not drawn again.
        drop: asked with a method and its samples before each of its pictures; True leaves the rest of them out.
    """
    found: dict[str, list[Sample]] = {method.key: [] for method in methods}
    for sample in known:
        found.setdefault(sample.key, []).append(sample)
    done = {(sample.key, sample.prompt, sample.seed) for sample in known}
    failed: set[str] = set()
    with tqdm(total=len(prompts) * len(seeds) * len(methods), unit="picture") as bar:
        for prompt in prompts:
            for seed in seeds:
                base: tuple[torch.Tensor, float] | None = None
                for method in methods:
                    bar.update()
                    missing = (method.key, prompt.text, seed) not in done
                    if not missing or method.key in failed or drop(method, found[method.key]):
                        continue
                    base = base or draw(pipes["cachekit"], prompt, seed, steps)
                    try:
                        sample = _sample(pipes[method.project], method, prompt, seed, *base)
                    except Exception as error:
                        failed.add(method.key)
                        tqdm.write(f"{method.key}: {type(error).__name__}: {error}")
                        continue
                    found[method.key].append(sample)
                    yield sample


def too_slow(speedup: float, after: int) -> Callable[[Method, Sequence[Sample]], bool]:
    """Leave a method out once `after` pictures show a median speed-up below `speedup`; the uncached run stays."""

    def drop(method: Method, samples: Sequence[Sample]) -> bool:
        if len(samples) < after or method.family == "uncached again":
            return False
        return statistics.median(sample.speedup for sample in samples) < speedup

    return drop


def read(folder: Path) -> list[Sample]:
    """All samples in the `samples*.jsonl` of a folder; a line that was cut off by an abort is left out."""
    found = []
    for path in sorted(folder.glob("samples*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                found.append(Sample(**json.loads(line)))
    return found


def write(samples: Iterator[Sample], path: Path) -> None:
    """Append samples to a file as they come."""
    if path.exists() and (text := path.read_text(encoding="utf-8")) and not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps(asdict(sample)) + "\n")
            file.flush()


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
