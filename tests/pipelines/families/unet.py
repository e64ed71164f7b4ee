"""The UNet pipelines: Stable Diffusion 1.5, its ControlNet, and XL. Guidance is one call on a doubled batch.

`scheduler(pipe, name)` swaps the sampler: PNDM and Heun call the UNet more often than they advance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers import (
    ControlNetModel,
    DDIMScheduler,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
    StableDiffusionControlNetPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)

from ..base import TinyPipeline
from ..parts import TEXT_WIDTH, byte_tokenizer, clip, clip_with_projection, image_vae, picture, redraw

SCHEDULERS = {
    "ddim": DDIMScheduler,
    "euler": EulerDiscreteScheduler,
    "heun": HeunDiscreteScheduler,
    "lcm": LCMScheduler,
    "pndm": PNDMScheduler,
}
BLOCKS: dict[str, Any] = {
    "block_out_channels": (8, 16, 16, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 8,
    "cross_attention_dim": TEXT_WIDTH,
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
}
NOISE: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "v_prediction",
}
"""Velocity, since a random model does not predict the noise and latents would grow without bound."""
UP_BLOCKS = ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3


def scheduler(pipe: DiffusionPipeline, name: str) -> DiffusionPipeline:
    """Replace the pipeline's scheduler, as users do, by one of `SCHEDULERS`; returns the pipeline."""
    pipe.scheduler = SCHEDULERS[name].from_config(pipe.scheduler.config)
    return pipe


def components() -> dict[str, Any]:
    return {
        "vae": image_vae(),
        "text_encoder": clip(),
        "tokenizer": byte_tokenizer(),
        "unet": redraw(UNet2DConditionModel(sample_size=8, up_block_types=UP_BLOCKS, **BLOCKS)),
        "scheduler": PNDMScheduler(skip_prk_steps=True, steps_offset=1, **NOISE),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }


def with_controlnet() -> StableDiffusionControlNetPipeline:
    controlnet = ControlNetModel(conditioning_embedding_out_channels=(4, 8), **BLOCKS)
    return StableDiffusionControlNetPipeline(controlnet=redraw(controlnet), **components())


def xl() -> StableDiffusionXLPipeline:
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        transformer_layers_per_block=(1, 1, 2),
        norm_num_groups=4,
        attention_head_dim=8,
        cross_attention_dim=2 * TEXT_WIDTH,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + TEXT_WIDTH,
    )
    return StableDiffusionXLPipeline(
        vae=image_vae(),
        text_encoder=clip(),
        tokenizer=byte_tokenizer(),
        text_encoder_2=clip_with_projection(),
        tokenizer_2=byte_tokenizer(),
        unet=redraw(unet),
        scheduler=EulerDiscreteScheduler(**NOISE),
        add_watermarker=False,
    )


def control(size: Mapping[str, int]) -> dict[str, Any]:
    return {"image": picture(**size)}


def family() -> list[TinyPipeline]:
    shared: dict[str, Any] = {
        "sizes": ({"height": 16, "width": 16}, {"height": 32, "width": 16}),
        "guided": {"guidance_scale": 5.0},
        "unguided": {"guidance_scale": 1.0},
        "denoisers": ("unet",),
        "batched_guidance": True,
        "cond_first": False,
    }
    return [
        TinyPipeline("sd15", lambda: StableDiffusionPipeline(**components()), **shared),
        TinyPipeline("sd15-controlnet", with_controlnet, per_size=control, **shared),
        TinyPipeline("sdxl", xl, **shared),
    ]
