"""Latte: spatial and temporal blocks in two lists that run interleaved; guidance on a doubled batch, uncond first."""

from __future__ import annotations

from diffusers import DDIMScheduler, LattePipeline, LatteTransformer3DModel

from ..base import TinyPipeline
from ..parts import TEXT_WIDTH, byte_tokenizer, image_vae, redraw, t5


def make() -> LattePipeline:
    transformer = LatteTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=4,
        cross_attention_dim=32,
        attention_bias=True,
        sample_size=8,
        patch_size=2,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        caption_channels=TEXT_WIDTH,
        video_length=2,
    )
    return LattePipeline(
        tokenizer=byte_tokenizer(bos=False),
        text_encoder=t5(),
        vae=image_vae(),
        transformer=redraw(transformer),
        scheduler=DDIMScheduler(prediction_type="v_prediction", clip_sample=False),
    )


def family() -> list[TinyPipeline]:
    return [
        TinyPipeline(
            "latte",
            make,
            sizes=(
                {"height": 16, "width": 16, "video_length": 2},
                {"height": 24, "width": 16, "video_length": 2},
            ),
            guided={"guidance_scale": 4.5},
            unguided={"guidance_scale": 1.0},
            common={"clean_caption": False},
            batched_guidance=True,
            cond_first=False,
            is_video=True,
        )
    ]
