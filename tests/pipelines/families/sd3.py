"""Stable Diffusion 3: guidance is one call on a doubled batch, unconditional half first."""

from __future__ import annotations

from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

from ..base import TinyPipeline
from ..parts import TEXT_WIDTH, byte_tokenizer, clip_with_projection, image_vae, redraw, t5


def make() -> StableDiffusion3Pipeline:
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=5,
        attention_head_dim=16,
        num_attention_heads=2,
        caption_projection_dim=32,
        joint_attention_dim=2 * TEXT_WIDTH,
        pooled_projection_dim=2 * TEXT_WIDTH,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=redraw(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(shift_factor=0.1),
        text_encoder=clip_with_projection(),
        tokenizer=byte_tokenizer(),
        text_encoder_2=clip_with_projection(),
        tokenizer_2=byte_tokenizer(),
        text_encoder_3=t5(2 * TEXT_WIDTH),
        tokenizer_3=byte_tokenizer(bos=False),
    )


def family() -> list[TinyPipeline]:
    return [
        TinyPipeline(
            "sd3",
            make,
            sizes=({"height": 16, "width": 16}, {"height": 24, "width": 16}),
            guided={"guidance_scale": 5.0},
            unguided={"guidance_scale": 1.0},
            common={"max_sequence_length": 16},
            batched_guidance=True,
            cond_first=False,
        )
    ]
