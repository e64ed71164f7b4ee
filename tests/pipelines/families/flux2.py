"""FLUX.2: `dev` takes guidance as an embedding (one call a step), `klein` makes two calls, conditional first."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from transformers import MistralConfig, PretrainedConfig, Qwen3Config

from ..base import TinyPipeline
from ..parts import TEXT_WIDTH, byte_tokenizer, language_model, redraw

TEXT_LAYERS = (1, 2, 3)


def components(language: type[PretrainedConfig], *, guidance_embeds: bool) -> dict[str, Any]:
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        mid_block_add_attention=False,
    )
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=4,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=len(TEXT_LAYERS) * TEXT_WIDTH,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        "vae": vae.eval(),
        "text_encoder": language_model(language),
        "tokenizer": byte_tokenizer(64),
        "transformer": redraw(transformer),
    }


def dev() -> Flux2Pipeline:
    pipe = Flux2Pipeline(**components(MistralConfig, guidance_embeds=True))
    pipe.system_message = "draw"
    return pipe


def klein() -> Flux2KleinPipeline:
    return Flux2KleinPipeline(**components(Qwen3Config, guidance_embeds=False))


def family() -> list[TinyPipeline]:
    shared: dict[str, Any] = {
        "sizes": ({"height": 16, "width": 16}, {"height": 24, "width": 16}),
        "guided": {"guidance_scale": 4.0},
        "unguided": {"guidance_scale": 1.0},
        "common": {"max_sequence_length": 48, "text_encoder_out_layers": TEXT_LAYERS},
        "negative": False,
    }
    return [
        TinyPipeline("flux2", dev, **shared),
        TinyPipeline("flux2-klein", klein, two_call_guidance=True, **shared),
    ]
