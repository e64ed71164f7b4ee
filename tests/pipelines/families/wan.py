"""Wan 2.1 (one denoiser) and Wan 2.2 (two, switched at `boundary_ratio`). Guidance is two calls, conditional first."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)

from ..base import TinyPipeline
from ..parts import TEXT_WIDTH, byte_tokenizer, redraw, umt5


def transformer() -> WanTransformer3DModel:
    return redraw(
        WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=TEXT_WIDTH,
            freq_dim=16,
            ffn_dim=32,
            num_layers=4,
            cross_attn_norm=True,
            rope_max_seq_len=32,
        )
    )


def make(*, experts: int) -> WanPipeline:
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return WanPipeline(
        tokenizer=byte_tokenizer(bos=False),
        text_encoder=umt5(),
        vae=vae.eval(),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        transformer=transformer(),
        transformer_2=transformer() if experts == 2 else None,
        boundary_ratio=0.8 if experts == 2 else None,
    )


def family() -> list[TinyPipeline]:
    shared: dict[str, Any] = {
        "sizes": (
            {"height": 32, "width": 32, "num_frames": 9},
            {"height": 32, "width": 48, "num_frames": 5},
        ),
        "guided": {"guidance_scale": 4.0},
        "unguided": {"guidance_scale": 1.0},
        "common": {"max_sequence_length": 16},
        "two_call_guidance": True,
        "is_video": True,
    }
    return [
        TinyPipeline("wan", lambda: make(experts=1), **shared),
        TinyPipeline("wan-two-experts", lambda: make(experts=2), denoisers=("transformer", "transformer_2"), **shared),
    ]
