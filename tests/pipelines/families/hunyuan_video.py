"""HunyuanVideo: double and single stream blocks after a token refiner; two calls, conditional first."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from transformers import LlamaConfig

from ..base import TinyPipeline
from ..parts import TEXT_WIDTH, byte_tokenizer, clip, language_model, redraw

CLIP_LENGTH = 77
"""The pipeline asks its CLIP for this many tokens, whatever the caller says."""


def make() -> HunyuanVideoPipeline:
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        mid_block_add_attention=False,
    )
    transformer = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=4,
        num_single_layers=4,
        num_refiner_layers=2,
        text_embed_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        rope_axes_dim=(4, 6, 6),
    )
    return HunyuanVideoPipeline(
        text_encoder=language_model(LlamaConfig),
        tokenizer=byte_tokenizer(64),
        transformer=redraw(transformer),
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=clip(CLIP_LENGTH),
        tokenizer_2=byte_tokenizer(CLIP_LENGTH),
    )


def family() -> list[TinyPipeline]:
    return [
        TinyPipeline(
            "hunyuan-video",
            make,
            sizes=(
                {"height": 32, "width": 32, "num_frames": 5},
                {"height": 48, "width": 32, "num_frames": 9},
            ),
            guided={"true_cfg_scale": 4.0},
            unguided={"true_cfg_scale": 1.0},
            common={"max_sequence_length": 16, "prompt_template": {"template": "{}", "crop_start": 0}},
            two_call_guidance=True,
            is_video=True,
        )
    ]
