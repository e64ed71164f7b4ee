"""Models for timing: a Flux pipeline with random weights, and one whose blocks do nothing."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import nn

TEXT_TOKENS, TEXT_WIDTH, POOLED_WIDTH = 32, 64, 32


def flux(layers: int, single_layers: int, heads: int, head_dim: int = 64) -> FluxTransformer2DModel:
    """A Flux transformer of width `heads` * `head_dim` with seeded random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FluxTransformer2DModel(
            in_channels=16,
            num_layers=layers,
            num_single_layers=single_layers,
            num_attention_heads=heads,
            attention_head_dim=head_dim,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=POOLED_WIDTH,
            axes_dims_rope=(head_dim // 4, head_dim * 3 // 8, head_dim * 3 // 8),
            guidance_embeds=False,
        )
    return model.eval()


def pipeline(model: FluxTransformer2DModel) -> FluxPipeline:
    """A Flux pipeline around a transformer, without text encoders and VAE."""
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=model,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sample(pipe: FluxPipeline, steps: int, size: int, guided: bool = False) -> torch.Tensor:
    """The denoising loop on `size` x `size` latent tokens; with guidance there are two calls a step."""
    embeds = torch.randn(1, TEXT_TOKENS, TEXT_WIDTH, generator=torch.Generator().manual_seed(1))
    pooled = embeds[:, 0, :POOLED_WIDTH]
    negative: dict[str, Any] = {}
    if guided:
        negative = {
            "negative_prompt_embeds": -embeds,
            "negative_pooled_prompt_embeds": -pooled,
            "true_cfg_scale": 3.0,
        }
    latents: torch.Tensor = pipe(
        prompt_embeds=embeds,
        pooled_prompt_embeds=pooled,
        height=size * 16,
        width=size * 16,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
        **negative,
    ).images
    return latents


class NoOpBlock(nn.Module):
    """Stands in for a Flux block: keeps its modules and parameters, but only adds a constant to both streams."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, temb: torch.Tensor, **unused: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, tokens, width) of both streams in, the same shapes out."""
        return encoder_hidden_states + 0.01, hidden_states + 0.01


def no_op_flux(layers: int = 19, single_layers: int = 38) -> FluxTransformer2DModel:
    """The block structure of FLUX.1 at a small width, with blocks that do nothing."""
    model = flux(layers, single_layers, heads=2, head_dim=16)
    model.transformer_blocks = nn.ModuleList(NoOpBlock(block) for block in model.transformer_blocks)
    model.single_transformer_blocks = nn.ModuleList(NoOpBlock(block) for block in model.single_transformer_blocks)
    return model
