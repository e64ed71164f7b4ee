"""Class- or text-conditioned DiTs: DiT, PixArt, Sana, the prior, and the transformers inside UNets."""

from __future__ import annotations

from functools import partial

import torch

from ..case import Draw, Inputs, case
from .mmdit import image
from .video import video

TEXT = 5
SIZE = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "num_layers": 4,
    "sample_size": 8,
    "patch_size": 2,
}
DIT = {**SIZE, "out_channels": 8, "num_embeds_ada_norm": 20}


@case("dit", "DiTTransformer2DModel", DIT)
def dit(d: Draw) -> Inputs:
    return {
        "hidden_states": d.latents(4, *d.pick((8, 8), (16, 16))),
        "timestep": d.time(dtype=torch.long),
        "class_labels": torch.full((d.batch,), 3 + d.branch),
    }


PIXART = {**SIZE, "out_channels": 8, "cross_attention_dim": 32, "caption_channels": 24}


def pixart(d: Draw, micro_conditions: bool) -> Inputs:
    kwargs = {
        **image(d),
        "encoder_attention_mask": d.ones(TEXT),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    if micro_conditions:
        kwargs["added_cond_kwargs"] = {"resolution": d.fill(64.0, 2), "aspect_ratio": d.fill(1.0, 1)}
    return kwargs


pixart_case = partial(case, cls="PixArtTransformer2DModel")
PIXART_ALPHA = {**PIXART, "num_attention_heads": 3, "cross_attention_dim": 48, "use_additional_conditions": True}
pixart_case("pixart-alpha", config=PIXART_ALPHA)(partial(pixart, micro_conditions=True))
pixart_case("pixart-sigma", config={**PIXART, "use_additional_conditions": False})(
    partial(pixart, micro_conditions=False)
)

SANA = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "num_layers": 4,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": 24,
}


def sana(d: Draw, guidance: bool = False, hints: bool = False) -> Inputs:
    kwargs = {**image(d), "encoder_attention_mask": d.ones(TEXT)}
    if guidance:
        kwargs["guidance"] = d.fill(4.5)
    if hints:
        tokens = kwargs["hidden_states"][0, 0].numel()
        kwargs["controlnet_block_samples"] = tuple(d.cond(tokens, 32) * 0.3 for _ in range(2))
    return kwargs


sana_case = partial(case, cls="SanaTransformer2DModel")
SANA_IMAGE = {**SANA, "sample_size": 8, "patch_size": 1}
sana_case("sana", config=SANA_IMAGE)(sana)
sana_case("sana-control", config=SANA_IMAGE)(partial(sana, hints=True))
SPRINT = {**SANA_IMAGE, "guidance_embeds": True, "qk_norm": "rms_norm_across_heads"}
sana_case("sana-sprint", config=SPRINT)(partial(sana, guidance=True))


@case("sana-video", "SanaVideoTransformer3DModel", {**SANA, "sample_size": 8, "rope_max_seq_len": 32})
def sana_video(d: Draw) -> Inputs:
    return {**video(d), "encoder_attention_mask": d.ones(TEXT)}


PRIOR = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 4,
    "embedding_dim": 12,
    "num_embeddings": TEXT,
    "additional_embeddings": 4,
}


@case("prior", "PriorTransformer", PRIOR, has_sizes=False)
def prior(d: Draw) -> Inputs:
    """Denoises one CLIP image embedding."""
    return {
        "hidden_states": d.latents(12),
        "timestep": d.time(),
        "proj_embedding": d.cond(12),
        "encoder_hidden_states": d.cond(TEXT, 12),
        "attention_mask": d.ones(TEXT, dtype=torch.bool),
    }


INNER = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 32,
    "num_layers": 4,
    "norm_num_groups": 8,
    "cross_attention_dim": 24,
}
ADA = {"norm_type": "ada_norm", "num_embeds_ada_norm": 1000}


def inner(d: Draw) -> Inputs:
    return {
        "hidden_states": d.latents(32, *d.pick((4, 4), (4, 6))),
        "encoder_hidden_states": d.cond(TEXT, 24),
        "timestep": torch.ones((), dtype=torch.long),
    }


case("transformer-2d", "Transformer2DModel", {**INNER, **ADA})(inner)
case("dreamlite-inner", "DreamLiteTransformer2DModel", {**INNER, **ADA})(inner)


@case(
    "transformer-temporal",
    "TransformerTemporalModel",
    {**INNER, "double_self_attention": False},
    uses_timestep=False,
    supports_batch=False,
    batch_note="frames are the batch dimension, and the text of a frame is repeated for every position",
)
def transformer_temporal(d: Draw) -> Inputs:
    """The motion module of AnimateDiff; no layer of it reads the timestep."""
    height, width = d.pick((4, 4), (4, 6))
    return {
        "hidden_states": d.shared(3, 32, height, width),
        "encoder_hidden_states": d.cond(TEXT, 24).expand(height * width, -1, -1),
        "timestep": d.time(),
        "num_frames": 3,
    }
