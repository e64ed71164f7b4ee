"""FLUX.1: text to image, image to image and with a ControlNet. True CFG is two calls, conditional first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxControlNetModel,
    FluxControlNetPipeline,
    FluxImg2ImgPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)

from ..base import TinyPipeline
from ..parts import TEXT_WIDTH, byte_tokenizer, clip, image_vae, picture, redraw, t5

SIZES = ({"height": 16, "width": 16}, {"height": 24, "width": 16})
GUIDED = {"true_cfg_scale": 4.0}
UNGUIDED = {"true_cfg_scale": 1.0}
WIDTHS: dict[str, Any] = {
    "in_channels": 16,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": TEXT_WIDTH,
    "pooled_projection_dim": TEXT_WIDTH,
    "axes_dims_rope": (4, 6, 6),
}


def components() -> dict[str, Any]:
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        "vae": image_vae(shift_factor=0.1),
        "text_encoder": clip(),
        "tokenizer": byte_tokenizer(),
        "text_encoder_2": t5(),
        "tokenizer_2": byte_tokenizer(bos=False),
        "transformer": redraw(
            FluxTransformer2DModel(num_layers=4, num_single_layers=4, guidance_embeds=True, **WIDTHS)
        ),
    }


def with_controlnet() -> FluxControlNetPipeline:
    controlnet = FluxControlNetModel(num_layers=2, num_single_layers=2, guidance_embeds=True, **WIDTHS)
    return FluxControlNetPipeline(controlnet=redraw(controlnet), **components())


def image(size: Mapping[str, int]) -> dict[str, Any]:
    return {"image": picture(**size)}


def control(size: Mapping[str, int]) -> dict[str, Any]:
    return {"control_image": picture(**size)}


def family() -> list[TinyPipeline]:
    shared: dict[str, Any] = {
        "sizes": SIZES,
        "guided": GUIDED,
        "unguided": UNGUIDED,
        "two_call_guidance": True,
    }
    short = {"max_sequence_length": 16}
    return [
        TinyPipeline("flux", lambda: FluxPipeline(**components()), common=short, **shared),
        TinyPipeline(
            "flux-img2img",
            lambda: FluxImg2ImgPipeline(**components()),
            common={"strength": 0.75, **short},
            per_size=image,
            **shared,
        ),
        TinyPipeline("flux-controlnet", with_controlnet, common=short, per_size=control, **shared),
    ]
