"""The Hunyuan denoisers."""

from __future__ import annotations

import torch

from ..case import Draw, Inputs, case
from .video import TEXT, video

COMMON = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_refiner_layers": 2,
    "mlp_ratio": 2.0,
    "text_embed_dim": 24,
}
VIDEO = {
    **COMMON,
    "num_layers": 3,
    "num_single_layers": 4,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (4, 6, 6),
}


def prompt(d: Draw) -> Inputs:
    return {**video(d), "encoder_attention_mask": d.ones(TEXT, dtype=torch.long)}


@case("hunyuan-video", "HunyuanVideoTransformer3DModel", VIDEO)
def hunyuan_video(d: Draw) -> Inputs:
    return {**prompt(d), "pooled_projections": d.cond(8), "guidance": d.fill(6016.0)}


I2V = {**VIDEO, "image_condition_type": "token_replace", "guidance_embeds": False}


@case("hunyuan-video-token-replace", "HunyuanVideoTransformer3DModel", I2V)
def hunyuan_video_i2v(d: Draw) -> Inputs:
    """Tokens of the first frame are modulated by another embedding than the rest."""
    return {**prompt(d), "pooled_projections": d.cond(8)}


VIDEO15 = {
    **COMMON,
    "num_layers": 4,
    "patch_size": 2,
    "text_embed_2_dim": 12,
    "image_embed_dim": 8,
    "rope_axes_dim": (4, 6, 6),
    "target_size": 16,
}


def video15(d: Draw) -> Inputs:
    return {
        **prompt(d),
        "encoder_hidden_states_2": d.cond(3, 12),
        "encoder_attention_mask_2": d.ones(3, dtype=torch.long),
    }


@case("hunyuan-video-15-t2v", "HunyuanVideo15Transformer3DModel", VIDEO15)
def hunyuan_video15(d: Draw) -> Inputs:
    """Image tokens of zeros mean text to video."""
    return {**video15(d), "image_embeds": torch.zeros(d.batch, 3, 8)}


@case("hunyuan-video-15-i2v", "HunyuanVideo15Transformer3DModel", {**VIDEO15, "use_meanflow": True})
def hunyuan_video15_i2v(d: Draw) -> Inputs:
    return {**video15(d), "image_embeds": d.cond(3, 8), "timestep_r": d.fill(10.0)}


FRAMEPACK = {**VIDEO, "has_image_proj": True, "image_proj_dim": 8, "has_clean_x_embedder": True}


INDICES = frozenset(
    {"indices_latents", "indices_latents_clean", "indices_latents_history_2x", "indices_latents_history_4x"}
)


@case("hunyuan-video-framepack", "HunyuanVideoFramepackTransformer3DModel", FRAMEPACK, unbatched=INDICES)
def framepack(d: Draw) -> Inputs:
    """History frames of three time scales share the sequence with the latents."""
    kwargs = prompt(d)
    height, width = kwargs["hidden_states"].shape[-2:]

    return {
        **kwargs,
        "pooled_projections": d.cond(8),
        "image_embeds": d.cond(3, 8),
        "guidance": d.fill(6016.0),
        "indices_latents": torch.arange(7, 9),
        "latents_clean": d.cond(4, 1, height, width),
        "indices_latents_clean": torch.arange(6, 7),
        "latents_history_2x": d.cond(4, 2, height, width),
        "indices_latents_history_2x": torch.arange(4, 6),
        "latents_history_4x": d.cond(4, 4, height, width),
        "indices_latents_history_4x": torch.arange(0, 4),
    }


IMAGE = {
    **COMMON,
    "num_layers": 3,
    "num_single_layers": 4,
    "patch_size": (1, 1),
    "text_embed_2_dim": 12,
    "rope_axes_dim": (8, 8),
}


@case("hunyuan-image", "HunyuanImageTransformer2DModel", {**IMAGE, "guidance_embeds": True})
def hunyuan_image(d: Draw) -> Inputs:
    height, width = d.pick((4, 4), (4, 6))
    return {
        **video15(d),
        "hidden_states": d.latents(4, height, width),
        "guidance": d.fill(3500.0),
    }


REFINER = {**IMAGE, "patch_size": (1, 1, 1), "text_embed_2_dim": None, "rope_axes_dim": (4, 6, 6)}
case("hunyuan-image-refiner", "HunyuanImageTransformer2DModel", REFINER)(prompt)

DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "patch_size": 2,
    "sample_size": 8,
    "hidden_size": 32,
    "num_layers": 6,
    "mlp_ratio": 2.0,
    "cross_attention_dim": 16,
    "cross_attention_dim_t5": 24,
    "pooled_projection_dim": 8,
    "text_len": 4,
    "text_len_t5": TEXT,
}
ROTARY = frozenset({"image_rotary_emb"})


def hunyuan_dit(d: Draw) -> Inputs:
    """The second half of the blocks takes the outputs of the first as `skip`."""
    tokens = d.pick(16, 24)
    angles = torch.outer(torch.arange(tokens).float(), 1 / 100 ** torch.linspace(0, 1, 8)).repeat_interleave(2, dim=1)
    return {
        "hidden_states": d.latents(4, *d.pick((8, 8), (8, 12))),
        "timestep": d.time(),
        "encoder_hidden_states": d.cond(4, 16),
        "text_embedding_mask": d.ones(4, dtype=torch.long),
        "encoder_hidden_states_t5": d.cond(TEXT, 24),
        "text_embedding_mask_t5": d.ones(TEXT, dtype=torch.long),
        "image_meta_size": torch.tensor([[64.0, 64, 64, 64, 0, 0]]).repeat(d.batch, 1),
        "style": torch.zeros(d.batch, dtype=torch.long),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


case("hunyuan-dit", "HunyuanDiT2DModel", DIT, unbatched=ROTARY)(hunyuan_dit)
