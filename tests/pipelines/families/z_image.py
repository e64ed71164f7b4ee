"""Z-Image: rising timesteps, lists of tensors as inputs; guidance on a doubled batch, *conditional* half first."""

from __future__ import annotations

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Config

from ..base import TinyPipeline
from ..parts import TEXT_WIDTH, byte_tokenizer, image_vae, language_model, redraw


def make() -> ZImagePipeline:
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=4,
        n_refiner_layers=2,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=TEXT_WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 32, 32],
    )
    # The model leaves its pad tokens as uninitialised memory.
    torch.nn.init.normal_(transformer.x_pad_token, std=0.1)
    torch.nn.init.normal_(transformer.cap_pad_token, std=0.1)
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(shift_factor=0.1),
        text_encoder=language_model(Qwen3Config),
        tokenizer=byte_tokenizer(64),
        transformer=redraw(transformer),
    )


def family() -> list[TinyPipeline]:
    return [
        TinyPipeline(
            "z-image",
            make,
            sizes=({"height": 16, "width": 16}, {"height": 32, "width": 24}),
            guided={"guidance_scale": 4.0},
            unguided={"guidance_scale": 0.0},
            common={"max_sequence_length": 48},
            batched_guidance=True,
        )
    ]
