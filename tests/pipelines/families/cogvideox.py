"""CogVideoX (sine positions, DDIM) and 1.5 (rotary positions, temporal patches, a DPM scheduler with its own `step`).

Guidance is one call on a doubled batch, unconditional half first.
"""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)

from ..base import TinyPipeline
from ..parts import TEXT_WIDTH, byte_tokenizer, redraw, t5

TEXT_LENGTH = 16


def make(scheduler: CogVideoXDDIMScheduler | CogVideoXDPMScheduler, **variant: Any) -> CogVideoXPipeline:
    vae = AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 3,
        up_block_types=("CogVideoXUpBlock3D",) * 3,
        block_out_channels=(8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
    )
    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=TEXT_WIDTH,
        num_layers=4,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        max_text_seq_length=TEXT_LENGTH,
        **variant,
    )
    return CogVideoXPipeline(
        tokenizer=byte_tokenizer(bos=False),
        text_encoder=t5(),
        vae=vae.eval(),
        transformer=redraw(transformer),
        scheduler=scheduler,
    )


def base() -> CogVideoXPipeline:
    return make(CogVideoXDDIMScheduler(rescale_betas_zero_snr=True, prediction_type="v_prediction"))


def version_15() -> CogVideoXPipeline:
    return make(
        CogVideoXDPMScheduler(prediction_type="v_prediction"),
        use_rotary_positional_embeddings=True,
        patch_size_t=2,
        patch_bias=False,
    )


def family() -> list[TinyPipeline]:
    shared: dict[str, Any] = {
        "sizes": (
            {"height": 32, "width": 32, "num_frames": 9},
            {"height": 32, "width": 16, "num_frames": 5},
        ),
        "guided": {"guidance_scale": 4.0},
        "unguided": {"guidance_scale": 1.0},
        "common": {"max_sequence_length": TEXT_LENGTH},
        "batched_guidance": True,
        "cond_first": False,
        "is_video": True,
    }
    return [TinyPipeline("cogvideox", base, **shared), TinyPipeline("cogvideox-1.5", version_15, **shared)]
