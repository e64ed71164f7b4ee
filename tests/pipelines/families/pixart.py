"""PixArt-Alpha (with size conditions) and PixArt-Sigma: T5 cross-attention, learned variance channels.

Guidance is one call on a doubled batch, unconditional half first. The schedulers predict velocity: a random model does
not predict the noise, and latents would grow without bound.
"""

from __future__ import annotations

from functools import partial

from diffusers import DPMSolverMultistepScheduler, PixArtAlphaPipeline, PixArtSigmaPipeline, PixArtTransformer2DModel

from ..base import TinyPipeline
from ..parts import TEXT_WIDTH, byte_tokenizer, image_vae, redraw, t5

SIZE_CONDITIONED = 128
"""PixArt-Alpha passes resolution and aspect ratio to the denoiser only at this sample size."""


def make(pipeline: type[PixArtAlphaPipeline] | type[PixArtSigmaPipeline], sample_size: int) -> PixArtAlphaPipeline:
    transformer = PixArtTransformer2DModel(
        sample_size=sample_size,
        patch_size=2,
        in_channels=4,
        out_channels=8,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=3,
        cross_attention_dim=48,
        caption_channels=TEXT_WIDTH,
        use_additional_conditions=sample_size == SIZE_CONDITIONED,
    )
    return pipeline(
        tokenizer=byte_tokenizer(bos=False),
        text_encoder=t5(),
        vae=image_vae(),
        transformer=redraw(transformer),
        scheduler=DPMSolverMultistepScheduler(prediction_type="v_prediction"),
    )


def family() -> list[TinyPipeline]:
    variants = (
        ("pixart-alpha", PixArtAlphaPipeline, SIZE_CONDITIONED),
        ("pixart-sigma", PixArtSigmaPipeline, 8),
    )
    return [
        TinyPipeline(
            name,
            partial(make, pipeline, sample_size),
            sizes=({"height": 16, "width": 16}, {"height": 24, "width": 16}),
            guided={"guidance_scale": 4.5},
            unguided={"guidance_scale": 1.0},
            common={"max_sequence_length": 24, "use_resolution_binning": False, "clean_caption": False},
            batched_guidance=True,
            cond_first=False,
            legacy_callback=True,
        )
        for name, pipeline, sample_size in variants
    ]
