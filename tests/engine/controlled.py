"""Tiny pipelines whose denoiser is controlled from beside: control-nets, adapters, image prompts, guided attention."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    ControlNetModel,
    DiffusionPipeline,
    SD3ControlNetModel,
    StableDiffusion3ControlNetPipeline,
    StableDiffusionAdapterPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionPAGPipeline,
    StableDiffusionPipeline,
    T2IAdapter,
    WanVACEPipeline,
    WanVACETransformer3DModel,
)
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection

from ..pipelines.families import sd3, unet, wan
from ..pipelines.parts import TEXT_WIDTH, picture, redraw

PICTURE = picture(16, 16)


def quiet(pipe: DiffusionPipeline) -> DiffusionPipeline:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def control_net() -> ControlNetModel:
    return redraw(ControlNetModel(conditioning_embedding_out_channels=(4, 8), **unet.BLOCKS))


def seeded(build: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def sd_control(nets: int = 1, sampler: str = "ddim") -> DiffusionPipeline:
    """Stable Diffusion with one or several control-nets."""

    def build() -> DiffusionPipeline:
        made = [control_net() for _ in range(nets)]
        return StableDiffusionControlNetPipeline(controlnet=made[0] if nets == 1 else made, **unet.components())

    return quiet(unet.scheduler(seeded(build), sampler))


def sd3_control() -> DiffusionPipeline:
    """Stable Diffusion 3 with a control-net."""

    def build() -> DiffusionPipeline:
        parts = sd3.make().components
        for name in ("image_encoder", "feature_extractor"):
            parts.pop(name, None)
        net = SD3ControlNetModel.from_transformer(
            parts["transformer"], num_layers=2, num_extra_conditioning_channels=0, load_weights_from_transformer=False
        )
        return StableDiffusion3ControlNetPipeline(controlnet=redraw(net), **parts)

    return quiet(seeded(build))


def sd_adapter() -> DiffusionPipeline:
    """Stable Diffusion with a T2I-Adapter, which runs once before the loop."""

    def build() -> DiffusionPipeline:
        adapter = T2IAdapter(
            in_channels=3, channels=[8, 16, 16, 16], num_res_blocks=1, downscale_factor=2, adapter_type="full_adapter"
        )
        return StableDiffusionAdapterPipeline(adapter=redraw(adapter), **unet.components())

    return quiet(unet.scheduler(seeded(build), "ddim"))


def sd_image_prompt() -> DiffusionPipeline:
    """Stable Diffusion with IP-Adapter's attention processors; call it with `ip_adapter_image_embeds`."""

    def build() -> DiffusionPipeline:
        pipe = StableDiffusionPipeline(**unet.components())
        net = pipe.unet
        projection = ImageProjection(cross_attention_dim=TEXT_WIDTH, image_embed_dim=8, num_image_text_embeds=4)
        net.encoder_hid_proj = MultiIPAdapterImageProjection([projection])
        net.config.encoder_hid_dim_type = "ip_image_proj"
        processors = dict(net.attn_processors)
        for name in processors:
            if name.endswith("attn2.processor"):
                attention = net.get_submodule(name.removesuffix(".processor"))
                processors[name] = IPAdapterAttnProcessor2_0(attention.inner_dim, TEXT_WIDTH, (4,), scale=1.0)
        net.set_attn_processor(processors)
        return pipe

    return quiet(unet.scheduler(seeded(build), "ddim"))


def sd_perturbed() -> DiffusionPipeline:
    """Stable Diffusion with perturbed-attention guidance."""

    def build() -> DiffusionPipeline:
        return StableDiffusionPAGPipeline(pag_applied_layers=["down"], **unet.components())

    return quiet(unet.scheduler(seeded(build), "ddim"))


def wan_vace() -> DiffusionPipeline:
    """Wan with VACE's second stack, whose hints are added between the blocks."""

    def build() -> DiffusionPipeline:
        parts = wan.make(experts=1).components
        config = {key: value for key, value in parts["transformer"].config.items() if not key.startswith("_")}
        config.pop("image_dim", None)
        made = WanVACETransformer3DModel(**{**config, "vace_layers": [0, 2], "vace_in_channels": 4 * 2 + 64})
        return WanVACEPipeline(
            **{key: parts[key] for key in ("tokenizer", "text_encoder", "vae", "scheduler")}, transformer=redraw(made)
        )

    return quiet(seeded(build))


def call(pipe: DiffusionPipeline, steps: int = 8, **options: Any) -> torch.Tensor:
    """One run; latents."""
    options = {"guidance_scale": 1.0, "height": 16, "width": 16, "prompt": "a cat", **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # Stable Diffusion 3 draws the encoded control image without the generator
        generator = torch.Generator().manual_seed(0)
        output = pipe(
            num_inference_steps=steps, generator=generator, output_type="latent", return_dict=False, **options
        )
    return torch.as_tensor(output[0])
