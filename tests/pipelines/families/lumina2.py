"""Lumina-Image 2: rising timesteps, refiner stacks before the main one; two calls, conditional first."""

from __future__ import annotations

from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel
from transformers import Gemma2Config

from ..base import TinyPipeline
from ..parts import TEXT_WIDTH, byte_tokenizer, image_vae, language_model, redraw


def make() -> Lumina2Pipeline:
    transformer = Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=32,
        num_layers=4,
        num_refiner_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=16,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(128, 32, 32),
        cap_feat_dim=TEXT_WIDTH,
    )
    return Lumina2Pipeline(
        transformer=redraw(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=image_vae(shift_factor=0.1),
        text_encoder=language_model(Gemma2Config),
        tokenizer=byte_tokenizer(64),
    )


def family() -> list[TinyPipeline]:
    return [
        TinyPipeline(
            "lumina2",
            make,
            sizes=({"height": 64, "width": 64}, {"height": 96, "width": 64}),
            guided={"guidance_scale": 4.0},
            unguided={"guidance_scale": 1.0},
            common={"max_sequence_length": 48, "system_prompt": "draw"},
            two_call_guidance=True,
        )
    ]
