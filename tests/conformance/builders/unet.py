"""UNets of images, videos and audio."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..case import UNIT, Draw, Inputs, case

TEXT = 5
unet_case = partial(case, kind="unet", latent_name="sample")
WIDTH = {"block_out_channels": (8, 16, 16), "layers_per_block": 1, "norm_num_groups": 4}


def blocks(kind: str) -> dict[str, Any]:
    return {
        "down_block_types": (f"CrossAttnDownBlock{kind}", f"CrossAttnDownBlock{kind}", f"DownBlock{kind}"),
        "up_block_types": (f"UpBlock{kind}", f"CrossAttnUpBlock{kind}", f"CrossAttnUpBlock{kind}"),
    }


CONDITION = {
    **WIDTH,
    **blocks("2D"),
    "sample_size": 16,
    "cross_attention_dim": 24,
    "attention_head_dim": 2,
}


def size(d: Draw) -> tuple[int, int]:
    return d.pick((8, 8), (8, 16))


def unet2d(d: Draw, channels: int = 4) -> Inputs:
    return {"sample": d.latents(channels, *size(d)), "timestep": d.time(), "encoder_hidden_states": d.cond(TEXT, 24)}


unet_case("unet-2d-condition", "UNet2DConditionModel", CONDITION)(unet2d)


@unet_case("unet-2d-condition-control", "UNet2DConditionModel", CONDITION)
def unet2d_control(d: Draw) -> Inputs:
    """Hints of a control-net for every skip connection and the middle."""
    kwargs = unet2d(d)
    height, width = size(d)
    shapes = [(8, 1), (8, 1), (8, 2), (16, 2), (16, 4), (16, 4)]
    hints = tuple(d.cond(c, height // scale, width // scale) * 0.3 for c, scale in shapes)
    return {
        **kwargs,
        "down_block_additional_residuals": hints,
        "mid_block_additional_residual": d.cond(16, height // 4, width // 4) * 0.3,
    }


XL = {
    **CONDITION,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 32,
    "use_linear_projection": True,
    "transformer_layers_per_block": (1, 2, 1),
}


@unet_case("unet-2d-condition-xl", "UNet2DConditionModel", XL)
def unet2d_xl(d: Draw) -> Inputs:
    return {**unet2d(d), "added_cond_kwargs": {"text_embeds": d.cond(8), "time_ids": d.fill(64.0, 6)}}


PIXEL = {
    **WIDTH,
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 4,
}


@unet_case("unet-2d", "UNet2DModel", PIXEL, uses_conditioning=False)
def unet_pixel(d: Draw) -> Inputs:
    return {"sample": d.latents(4, *size(d)), "timestep": d.time(dtype=torch.long)}


@unet_case("unet-2d-classes", "UNet2DModel", {**PIXEL, "num_class_embeds": 4})
def unet_classes(d: Draw) -> Inputs:
    return {**unet_pixel(d), "class_labels": torch.full((d.batch,), d.branch)}


AUDIO = {
    "in_channels": 4,
    "out_channels": 4,
    "extra_in_channels": 64,
    "block_out_channels": (32, 32, 64),
    "sample_size": 32,
}


@unet_case("unet-1d", "UNet1DModel", AUDIO, uses_conditioning=False, times=UNIT)
def unet1d(d: Draw) -> Inputs:
    return {"sample": d.latents(4, d.pick(32, 64)), "timestep": d.time()}


def frames(d: Draw, channels: int = 4) -> Inputs:
    return {
        "sample": d.latents(channels, 3, *size(d)),
        "timestep": d.time(),
        "encoder_hidden_states": d.cond(TEXT, 24),
    }


VIDEO = {**WIDTH, **blocks("3D"), "cross_attention_dim": 24, "attention_head_dim": 4}
unet_case("unet-3d-condition", "UNet3DConditionModel", VIDEO)(frames)


@unet_case("i2vgen-xl", "I2VGenXLUNet", VIDEO)
def i2vgen(d: Draw) -> Inputs:
    return {
        **frames(d),
        "fps": d.fill(8.0),
        "image_latents": d.cond(4, 3, *size(d)),
        "image_embeddings": d.cond(24),
    }


MOTION = {
    **WIDTH,
    **blocks("Motion"),
    "cross_attention_dim": 24,
    "num_attention_heads": 2,
    "motion_num_attention_heads": 2,
    "motion_max_seq_length": 4,
}


@unet_case("unet-motion", "UNetMotionModel", MOTION)
def unet_motion(d: Draw) -> Inputs:
    """The text is repeated for every frame, on the batch dimension."""
    kwargs = frames(d)
    return {**kwargs, "encoder_hidden_states": kwargs["encoder_hidden_states"].repeat_interleave(3, dim=0)}


SVD = {
    **blocks("SpatioTemporal"),
    "block_out_channels": (32, 64, 64),
    "layers_per_block": 1,
    "in_channels": 8,
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 12,
    "cross_attention_dim": 24,
    "num_attention_heads": (2, 2, 2),
    "num_frames": 3,
}


@unet_case("unet-spatio-temporal", "UNetSpatioTemporalConditionModel", SVD)
def svd(d: Draw) -> Inputs:
    """Frames come before channels."""
    return {
        "sample": d.latents(3, 8, *size(d)),
        "timestep": d.time(),
        "encoder_hidden_states": d.cond(1, 24),
        "added_time_ids": d.fill(6.0, 3),
    }


KANDINSKY3 = {
    "time_embedding_dim": 16,
    "groups": 4,
    "attention_head_dim": 4,
    "layers_per_block": 2,
    "block_out_channels": (8, 16, 32, 32),
    "cross_attention_dim": 16,
    "encoder_hid_dim": 24,
}


@unet_case("kandinsky3", "Kandinsky3UNet", KANDINSKY3)
def kandinsky3(d: Draw) -> Inputs:
    return {**unet2d(d), "encoder_attention_mask": d.ones(TEXT)}


CASCADE = {
    "in_channels": 4,
    "out_channels": 4,
    "timestep_ratio_embedding_dim": 8,
    "conditioning_dim": 16,
    "block_out_channels": (16, 16),
    "num_attention_heads": (2, 2),
    "down_num_layers_per_block": (1, 2),
    "up_num_layers_per_block": (2, 1),
    "clip_text_in_channels": 24,
    "clip_text_pooled_in_channels": 12,
    "clip_image_in_channels": 8,
    "clip_seq": 2,
    "dropout": (0.0, 0.0),
}


@unet_case("stable-cascade-prior", "StableCascadeUNet", CASCADE, times=UNIT, timestep_name="timestep_ratio", gain=0.5)
def cascade(d: Draw) -> Inputs:
    return {
        "sample": d.latents(4, *size(d)),
        "timestep_ratio": d.time(),
        "clip_text_pooled": d.cond(1, 12),
        "clip_text": d.cond(TEXT, 24),
        "clip_img": d.cond(1, 8),
    }


DREAMLITE = {
    "block_out_channels": (16, 16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "sample_size": 16,
    "cross_attention_dim": 24,
    "attention_head_dim": 2,
    "ff_mult": 2,
    "transformer_layers_per_block": (1, 1, 2),
}
unet_case("dreamlite-unet", "DreamLiteUNetModel", DREAMLITE)(unet2d)

XS = {
    **blocks("2D"),
    "sample_size": 16,
    "block_out_channels": (8, 16, 16),
    "norm_num_groups": 4,
    "cross_attention_dim": 24,
    "transformer_layers_per_block": 1,
    "num_attention_heads": 2,
    "ctrl_conditioning_embedding_out_channels": (4, 8),
    "ctrl_block_out_channels": (4, 8, 8),
    "ctrl_num_attention_heads": 2,
    "ctrl_max_norm_num_groups": 4,
}


@unet_case("unet-controlnet-xs", "UNetControlNetXSModel", XS)
def unet_xs(d: Draw) -> Inputs:
    """A small UNet runs beside the large one, and both exchange features in every block."""
    height, width = size(d)
    return {**unet2d(d), "controlnet_cond": d.cond(3, 2 * height, 2 * width)}
