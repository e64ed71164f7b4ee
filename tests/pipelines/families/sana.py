"""Sana: linear attention, Gemma text; guidance on a doubled batch, unconditional half first."""

from __future__ import annotations

from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel
from transformers import Gemma2Config

from ..base import TinyPipeline
from ..parts import TEXT_WIDTH, byte_tokenizer, language_model, redraw


def make() -> SanaPipeline:
    vae = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=4,
        encoder_block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        encoder_layers_per_block=(1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        encoder_qkv_multiscales=((), (), (), ()),
        decoder_qkv_multiscales=((), (), (), ()),
        scaling_factor=0.5,
    )
    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=TEXT_WIDTH,
        sample_size=4,
    )
    return SanaPipeline(
        tokenizer=byte_tokenizer(),
        text_encoder=language_model(Gemma2Config),
        vae=vae.eval(),
        transformer=redraw(transformer),
        scheduler=DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    )


def family() -> list[TinyPipeline]:
    return [
        TinyPipeline(
            "sana",
            make,
            sizes=({"height": 32, "width": 32}, {"height": 64, "width": 32}),
            guided={"guidance_scale": 4.5},
            unguided={"guidance_scale": 1.0},
            common={
                "max_sequence_length": 24,
                "use_resolution_binning": False,
                "complex_human_instruction": None,
            },
            batched_guidance=True,
            cond_first=False,
        )
    ]
