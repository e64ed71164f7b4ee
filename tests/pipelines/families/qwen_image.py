"""Qwen-Image: two calls, conditional first, whose text lengths differ."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2Config

from ..base import TinyPipeline
from ..parts import TEXT_WIDTH, byte_tokenizer, language_model, redraw


def make() -> QwenImagePipeline:
    vae = AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    transformer = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    pipe = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae.eval(),
        text_encoder=language_model(Qwen2Config),
        tokenizer=byte_tokenizer(64),
        transformer=redraw(transformer),
    )
    pipe.prompt_template_encode = "{}"
    pipe.prompt_template_encode_start_idx = 0
    return pipe


def family() -> list[TinyPipeline]:
    return [
        TinyPipeline(
            "qwen-image",
            make,
            sizes=({"height": 16, "width": 16}, {"height": 24, "width": 16}),
            guided={"true_cfg_scale": 4.0},
            unguided={"true_cfg_scale": 1.0},
            common={"max_sequence_length": 32},
            two_call_guidance=True,
        )
    ]
