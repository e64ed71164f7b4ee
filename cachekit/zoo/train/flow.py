"""Stage 2: a small Flux transformer that learns the velocity from data to noise on the latents of the pictures.

The objective is rectified flow matching (Liu et al. 2022, arXiv:2209.03003) with logit-normal times (Esser et al.
2024, arXiv:2403.03206): x_s = (1 - s) x + s e, and the model predicts e - x at time s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import FluxPipeline, FluxTransformer2DModel
from tqdm import tqdm

from cachekit.zoo.train.budget import Budget, learning_rate
from cachekit.zoo.train.checkpoint import restore, save
from cachekit.zoo.train.parallel import Microbatches

CONFIG: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 40,
    "num_layers": 2,
    "num_single_layers": 6,
    "num_attention_heads": 6,
    "attention_head_dim": 32,
    "axes_dims_rope": [8, 12, 12],
    "joint_attention_dim": 128,
    "pooled_projection_dim": 64,
    "guidance_embeds": False,
}

BATCH, MICRO = 32, 8
PEAK_LEARNING_RATE = 1.2e-3
PROMPT_DROPOUT = 0.1
EMA_DECAY = 0.995
TIME_SHIFT = 0.5
"""Mean of the logit of the training times: a little more noise than signal, where the prompt decides."""


@dataclass(frozen=True)
class Dataset:
    """What the transformer is trained on.

    Attributes:
        latents: Scaled and packed latents, shape (glyphs, views, 64 tokens, 40).
        words: T5 states of every prompt, then of the empty prompt, shape (glyphs + 1, tokens, 128).
        pooled: Pooled CLIP states in the same order, shape (glyphs + 1, 64).
    """

    latents: torch.Tensor
    words: torch.Tensor
    pooled: torch.Tensor

    def batches(self, size: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield (latents, noise, times, words, pooled) without end; every glyph comes once before any comes again."""
        glyphs, views = self.latents.shape[:2]
        order = torch.empty(0, dtype=torch.long)
        while True:
            if len(order) < size:
                order = torch.cat([order, torch.randperm(glyphs)])
            glyph, order = order[:size], order[size:]
            clean = self.latents[glyph, torch.randint(views, (size,))]
            times = (torch.randn(size) + TIME_SHIFT).sigmoid()
            prompt = torch.where(torch.rand(size) < PROMPT_DROPOUT, glyphs, glyph)
            yield clean, torch.randn_like(clean), times, self.words[prompt], self.pooled[prompt]


def pack(latents: torch.Tensor) -> torch.Tensor:
    """Fold 2x2 latents into one token as FluxPipeline does: (N, C, H, W) to (N, H/2 * W/2, 4C)."""
    count, channels, height, width = latents.shape
    packed: torch.Tensor = FluxPipeline._pack_latents(latents, count, channels, height, width)
    return packed


def new_transformer(seed: int) -> FluxTransformer2DModel:
    """Build the transformer with Xavier weights and closed gates (adaLN-Zero, arXiv:2212.09748)."""
    torch.manual_seed(seed + 2)
    model = FluxTransformer2DModel(**CONFIG)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(module.weight)
            torch.nn.init.zeros_(module.bias)
            if name == "proj_out" or (".norm" in name or name.startswith("norm_out")):
                torch.nn.init.zeros_(module.weight)
    return model


@torch.no_grad()
def whiten(linear: torch.nn.Linear, states: torch.Tensor, floor: float = 0.01) -> None:
    """Set a linear layer so that over ``states`` its outputs have mean 0 and spread evenly in every direction.

    Random text encoders put most of the difference between prompts into a few directions (10 of 64 for CLIP here), and
    a transformer that has to find the rest first learns to draw anything long before it learns to draw what is asked.

    Args:
        linear: Layer with at least as many outputs as inputs; its weight and bias are replaced.
        states: Inputs, shape (..., in_features).
        floor: Variances below this part of the mean variance are not raised further.
    """
    flat = states.flatten(0, -2).double()
    centred = flat - flat.mean(0)
    variance, directions = torch.linalg.eigh(centred.T @ centred / len(flat))
    scale = (variance + floor * variance.mean()).rsqrt()
    frame = torch.linalg.qr(torch.randn(linear.out_features, linear.in_features, dtype=torch.float64)).Q
    frame = frame * math.sqrt(linear.out_features / linear.in_features)
    weight = frame @ (directions * scale).T
    linear.weight.copy_(weight)
    linear.bias.copy_(-weight @ flat.mean(0))


def train_flow(
    data: Dataset, out: Path, steps: int | None, minutes: float | None, seed: int, workers: int
) -> FluxTransformer2DModel:
    """Train the transformer and return its exponential moving average.

    Args:
        data: Latents and prompt states.
        out: Folder of the checkpoint; an interrupted run goes on from there.
        steps: Number of steps, or None to end by ``minutes``.
        minutes: Wall-clock budget over all resumed parts, used when ``steps`` is None.
        seed: Seeds the weights, the order of the pictures, times and noise.
        workers: Cores to use.
    """
    model = new_transformer(seed)
    whiten(model.time_text_embed.text_embedder.linear_1, data.pooled)
    whiten(model.context_embedder, data.words)
    average = deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0, fused=True
    )
    both = torch.nn.ModuleDict({"model": model, "average": average})
    path = out / "flow.pt"
    state = restore(path, model=both, optimizer=optimizer)
    step, history = int(state.get("step", 0)), list(state.get("history", []))
    budget = Budget(steps, minutes, spent=float(state.get("seconds", 0.0)))
    image_ids = FluxPipeline._prepare_latent_image_ids(1, 8, 8, torch.device("cpu"), torch.float32)
    text_ids = torch.zeros(data.words.shape[1], 3)
    parallel = Microbatches(model, workers)

    def loss(
        clean: torch.Tensor, noise: torch.Tensor, times: torch.Tensor, words: torch.Tensor, pooled: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mix = times[:, None, None]
        velocity = model(
            hidden_states=torch.lerp(clean, noise, mix),
            timestep=times,
            encoder_hidden_states=words,
            pooled_projections=pooled,
            img_ids=image_ids,
            txt_ids=text_ids,
            return_dict=False,
        )[0]
        value = F.mse_loss(velocity, noise - clean)
        return value, value.detach()

    smooth: float | None = None
    bar = tqdm(desc="flow", unit="step", initial=step, total=steps)
    batches = data.batches(BATCH)
    while (progress := budget.progress(step)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(PEAK_LEARNING_RATE, step, progress, warmup=50)
        parts = [tensor.chunk(BATCH // MICRO) for tensor in next(batches)]
        figure = parallel.backward(loss, list(zip(*parts, strict=True))).item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        decay = min(EMA_DECAY, (1 + step) / (10 + step))
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 1.0 - decay)
        smooth = figure if smooth is None else 0.98 * smooth + 0.02 * figure
        bar.update()
        bar.set_postfix(loss=f"{smooth:.4f}", budget=f"{progress:.0%}")
        if step % 20 == 0:
            history.append((step, smooth))
        if step % 100 == 0:
            save(path, both, optimizer, step=step, seconds=budget.seconds, history=history)
    bar.close()
    save(path, both, optimizer, step=step, seconds=budget.seconds, history=history)
    return average.eval()


def averaged(out: Path) -> FluxTransformer2DModel:
    """Return the moving average in the last checkpoint of ``out``, ready to draw with."""
    stored = torch.load(out / "flow.pt", map_location="cpu", weights_only=True)["model"]
    model = FluxTransformer2DModel(**CONFIG)
    model.load_state_dict({name[8:]: value for name, value in stored.items() if name.startswith("average.")})
    return model.eval()
