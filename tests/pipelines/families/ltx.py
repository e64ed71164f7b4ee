"""LTX-Video: packed video tokens, T5 cross-attention, guidance on a doubled batch, unconditional half first."""

from __future__ import annotations

from diffusers import AutoencoderKLLTXVideo, FlowMatchEulerDiscreteScheduler, LTXPipeline, LTXVideoTransformer3DModel

from ..base import TinyPipeline
from ..parts import TEXT_WIDTH, byte_tokenizer, redraw, t5


def make() -> LTXPipeline:
    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        patch_size=1,
    )
    transformer = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=4,
        caption_channels=TEXT_WIDTH,
    )
    return LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, shift_terminal=0.1
        ),
        vae=vae.eval(),
        text_encoder=t5(),
        tokenizer=byte_tokenizer(bos=False),
        transformer=redraw(transformer),
    )


def family() -> list[TinyPipeline]:
    return [
        TinyPipeline(
            "ltx",
            make,
            sizes=(
                {"height": 32, "width": 32, "num_frames": 9},
                {"height": 64, "width": 32, "num_frames": 9},
            ),
            guided={"guidance_scale": 3.0},
            unguided={"guidance_scale": 1.0},
            common={"max_sequence_length": 16},
            batched_guidance=True,
            cond_first=False,
            is_video=True,
        )
    ]
