"""Stage 1: a small AutoencoderKL that maps 64x64 pictures to 16x16 latents with 10 channels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from tqdm import tqdm

from cachekit.zoo.train.budget import Budget, learning_rate
from cachekit.zoo.train.checkpoint import restore, save
from cachekit.zoo.train.parallel import Microbatches
from cachekit.zoo.train.pictures import to_unit

CONFIG: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "block_out_channels": [16, 32, 64],
    "layers_per_block": 1,
    "latent_channels": 10,
    "norm_num_groups": 4,
    "sample_size": 64,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}

BATCH, MICRO = 8, 4
"""Pictures a step, and pictures a micro-batch."""

COLOUR_WEIGHT = 0.2
"""Weight of the guide that ties the last two latent channels to colour.

Without it a short training finds outlines and brightness first and mixes up red and green for a long time.
"""

CROP, CROPPED = 32, 0.7
"""For the first 70 % of the budget a step sees 32x32 windows: four times as many steps for the same work."""

KL_WEIGHT = 1e-4
"""Weight of the mean KL divergence per latent value; small, it only keeps the latents smooth."""


def new_vae() -> AutoencoderKL:
    """Build the autoencoder so that it starts with little latent noise (log variance -5)."""
    vae = AutoencoderKL(**CONFIG)
    torch.nn.init.constant_(vae.encoder.conv_out.bias[CONFIG["latent_channels"] :], -5.0)
    return vae


def random_crop(pictures: torch.Tensor, size: int) -> torch.Tensor:
    """Cut one random window of ``size`` by ``size`` pixels, the same for the whole batch."""
    top, left = torch.randint(pictures.shape[-1] - size + 1, (2,)).tolist()
    return pictures[..., top : top + size, left : left + size]


def edges(pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the horizontal and vertical differences of neighbouring pixels."""
    return pictures[..., 1:] - pictures[..., :-1], pictures[..., 1:, :] - pictures[..., :-1, :]


def colours(pictures: torch.Tensor) -> torch.Tensor:
    """Return the colour differences (red - green, green - blue) of each 4x4 cell, scaled to about unit spread."""
    cells = F.avg_pool2d(pictures, 4)
    return 2.7 * torch.stack([cells[:, 0] - cells[:, 1], cells[:, 1] - cells[:, 2]], dim=1)


def reconstruction_loss(drawn: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """L1 on pixels plus L1 on edges: flat areas stay flat and outlines stay sharp."""
    loss = F.l1_loss(drawn, wanted)
    for ours, theirs in zip(edges(drawn), edges(wanted), strict=True):
        loss = loss + 0.5 * F.l1_loss(ours, theirs)
    return loss


def train_vae(
    pictures: torch.Tensor, out: Path, steps: int | None, minutes: float | None, seed: int, workers: int
) -> AutoencoderKL:
    """Train the autoencoder on a pool of pictures and set its latent statistics.

    Args:
        pictures: uint8, shape (glyphs, views, 3, 64, 64).
        out: Folder of the checkpoint; an interrupted run goes on from there.
        steps: Number of steps, or None to end by ``minutes``.
        minutes: Wall-clock budget, used when ``steps`` is None.
        seed: Seeds the weights and the order of the pictures.
        workers: Cores to use.
    """
    torch.manual_seed(seed)
    vae = new_vae()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=1e-4)
    path = out / "vae.pt"
    state = restore(path, model=vae, optimizer=optimizer)
    step, history = int(state.get("step", 0)), list(state.get("history", []))
    budget = Budget(steps, minutes, spent=float(state.get("seconds", 0.0)))
    parallel = Microbatches(vae, workers)

    def loss(wanted: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        posterior = vae.encode(wanted).latent_dist
        drawn = vae.decode(posterior.mean + posterior.std * noise).sample
        kl = posterior.kl().mean() / noise[0].numel()
        rebuilt = reconstruction_loss(drawn, wanted)
        value = rebuilt + KL_WEIGHT * kl + COLOUR_WEIGHT * F.mse_loss(posterior.mean[:, -2:], colours(wanted))
        return value, torch.stack([rebuilt, F.mse_loss(drawn, wanted), kl]).detach()

    flat = pictures.flatten(0, 1)
    bar = tqdm(desc="vae", unit="step", initial=step, total=steps)
    while (progress := budget.progress(step)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(2e-3, step, progress, warmup=50)
        whole = to_unit(flat[torch.randint(len(flat), (BATCH,))])
        wanted = random_crop(whole, CROP) if progress < CROPPED else whole
        noise = torch.randn(BATCH, 10, wanted.shape[2] // 4, wanted.shape[3] // 4)
        parts = BATCH // MICRO
        figures = parallel.backward(loss, list(zip(wanted.chunk(parts), noise.chunk(parts), strict=True)))
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        step += 1
        bar.update()
        if step % 20 == 0:
            rebuilt, mse, kl = figures.tolist()
            history.append((step, rebuilt, mse, kl))
            bar.set_postfix(loss=f"{rebuilt:.4f}", psnr=f"{10 * math.log10(4 / mse):.1f}")
        if step % 200 == 0:
            save(path, vae, optimizer, step=step, seconds=budget.seconds, history=history)
    bar.close()
    save(path, vae, optimizer, step=step, seconds=budget.seconds, history=history)
    return with_statistics(vae.eval(), pictures)


def with_statistics(vae: AutoencoderKL, pictures: torch.Tensor) -> AutoencoderKL:
    """Set ``shift_factor`` and ``scaling_factor`` so that scaled latents have mean 0 and standard deviation 1."""
    latents = encode(vae, pictures[:, :4])
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1.0 / latents.std().item())
    return vae


@torch.no_grad()
def encode(vae: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    """Return the raw latents (posterior mean), shape (glyphs, views, 10, 16, 16)."""
    rows = [vae.encode(to_unit(views)).latent_dist.mode() for views in tqdm(pictures, desc="encoding", unit="glyph")]
    return torch.stack(rows).contiguous()
