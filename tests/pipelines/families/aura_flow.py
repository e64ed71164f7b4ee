"""AuraFlow: joint blocks, then single-stream blocks; guidance on a doubled batch, unconditional half first."""

from __future__ import annotations

from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler

from ..base import TinyPipeline
from ..parts import TEXT_WIDTH, byte_tokenizer, image_vae, redraw, umt5


def make() -> AuraFlowPipeline:
    transformer = AuraFlowTransformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=4,
        num_single_dit_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        caption_projection_dim=32,
        pos_embed_max_size=64,
    )
    return AuraFlowPipeline(
        tokenizer=byte_tokenizer(bos=False),
        text_encoder=umt5(),
        vae=image_vae(),
        transformer=redraw(transformer, modulation=1.5),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
    )


def family() -> list[TinyPipeline]:
    return [
        TinyPipeline(
            "aura-flow",
            make,
            sizes=({"height": 16, "width": 16}, {"height": 24, "width": 16}),
            guided={"guidance_scale": 7.0},
            unguided={"guidance_scale": 1.0},
            common={"max_sequence_length": 16},
            batched_guidance=True,
            cond_first=False,
        )
    ]
