"""Stage 1b: the decoder goes on learning from the frozen encoder's latents, with noise on them.

The transformer never hits the latents exactly. A decoder that has seen noisy ones draws clean pictures from its near
misses. The latents stay as they are, so this stage may run before, beside or after the transformer's.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from tqdm import tqdm

from cachekit.zoo.train.budget import Budget, learning_rate
from cachekit.zoo.train.checkpoint import restore, save
from cachekit.zoo.train.parallel import Microbatches
from cachekit.zoo.train.pictures import to_unit
from cachekit.zoo.train.vae import reconstruction_loss

BATCH, MICRO = 8, 4
PEAK_LEARNING_RATE = 1e-3

NOISE = 0.1
"""Standard deviation of the noise on the latents, in units of theirs."""


def refine_decoder(
    vae: AutoencoderKL,
    pictures: torch.Tensor,
    latents: torch.Tensor,
    out: Path,
    steps: int | None,
    minutes: float | None,
    seed: int,
    workers: int,
) -> AutoencoderKL:
    """Train the decoder of ``vae`` in place and return ``vae``.

    Args:
        vae: The trained autoencoder.
        pictures: uint8, shape (glyphs, views, 3, 64, 64).
        latents: What the encoder makes of them, shape (glyphs, views, 10, 16, 16).
        out: Folder of the checkpoint; an interrupted run goes on from there.
        steps: Number of steps, or None to end by ``minutes``.
        minutes: Wall-clock budget over all resumed parts, used when ``steps`` is None.
        seed: Seeds the order of the pictures and the noise.
        workers: Cores to use.
    """
    torch.manual_seed(seed + 3)
    decoder = vae.decoder
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=1e-4)
    path = out / "decoder.pt"
    state = restore(path, model=decoder, optimizer=optimizer)
    step, history = int(state.get("step", 0)), list(state.get("history", []))
    budget = Budget(steps, minutes, spent=float(state.get("seconds", 0.0)))
    parallel = Microbatches(decoder, workers)
    noise = NOISE / vae.config.scaling_factor

    def loss(latent: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = decoder(latent)
        value = reconstruction_loss(drawn, wanted)
        return value, torch.stack([value, F.mse_loss(drawn, wanted)]).detach()

    flat_pictures, flat_latents = pictures.flatten(0, 1), latents.flatten(0, 1)
    bar = tqdm(desc="decoder", unit="step", initial=step, total=steps)
    while (progress := budget.progress(step)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(PEAK_LEARNING_RATE, step, progress, warmup=50)
        index = torch.randint(len(flat_pictures), (BATCH,))
        latent = flat_latents[index] + noise * torch.randn_like(flat_latents[index])
        wanted = to_unit(flat_pictures[index])
        parts = BATCH // MICRO
        figures = parallel.backward(loss, list(zip(latent.chunk(parts), wanted.chunk(parts), strict=True)))
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        step += 1
        bar.update()
        if step % 20 == 0:
            value, mse = figures.tolist()
            history.append((step, value, mse))
            bar.set_postfix(loss=f"{value:.4f}", psnr=f"{10 * math.log10(4 / mse):.1f}")
        if step % 100 == 0:
            save(path, decoder, optimizer, step=step, seconds=budget.seconds, history=history)
    bar.close()
    save(path, decoder, optimizer, step=step, seconds=budget.seconds, history=history)
    return vae.eval()


def load_refined(vae: AutoencoderKL, out: Path) -> AutoencoderKL:
    """Put the decoder of the last checkpoint in ``out``, if there is one, into ``vae`` and return it."""
    path = out / "decoder.pt"
    if path.exists():
        vae.decoder.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["model"])
    return vae.eval()
