"""Mochi: rising timesteps (inverted sigmas), guidance on a doubled batch, unconditional half first."""

from __future__ import annotations

from diffusers import AutoencoderKLMochi, FlowMatchEulerDiscreteScheduler, MochiPipeline, MochiTransformer3DModel

from ..base import TinyPipeline
from ..parts import TEXT_WIDTH, byte_tokenizer, redraw, t5

CHANNELS = 12
"""The pipeline fixes the number of latent channels, the spatial (8) and the temporal (6) compression."""


def make() -> MochiPipeline:
    vae = AutoencoderKLMochi(
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        latent_channels=CHANNELS,
        layers_per_block=(1,) * 5,
        add_attention_block=(False,) * 5,
    )
    transformer = MochiTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=4,
        pooled_projection_dim=16,
        in_channels=CHANNELS,
        text_embed_dim=TEXT_WIDTH,
        time_embed_dim=16,
        max_sequence_length=16,
    )
    return MochiPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        vae=vae.eval(),
        text_encoder=t5(),
        tokenizer=byte_tokenizer(bos=False),
        transformer=redraw(transformer),
    )


def family() -> list[TinyPipeline]:
    return [
        TinyPipeline(
            "mochi",
            make,
            sizes=(
                {"height": 32, "width": 32, "num_frames": 7},
                {"height": 48, "width": 32, "num_frames": 7},
            ),
            guided={"guidance_scale": 4.5},
            unguided={"guidance_scale": 1.0},
            common={"max_sequence_length": 16},
            batched_guidance=True,
            cond_first=False,
            is_video=True,
        )
    ]
