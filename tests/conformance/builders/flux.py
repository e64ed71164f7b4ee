"""Flux and its relatives: double-stream blocks, then single-stream blocks, on packed image tokens."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..case import UNIT, Draw, Inputs, case

IDS = frozenset({"img_ids", "txt_ids", "image_cond_ids"})
TEXT, DIM = 5, 32


def grid_ids(height: int, width: int, axes: int = 3) -> Tensor:
    """`[height * width, axes]` positions; row and column stand in axes 1 and 2."""
    ids = torch.zeros(height, width, axes)
    ids[..., 1] = torch.arange(height)[:, None]
    ids[..., 2] = torch.arange(width)[None, :]
    return ids.reshape(height * width, axes)


def packed(d: Draw, channels: int = 4, axes: int = 3) -> Inputs:
    """What all of them take: packed latents, text, positions and a timestep."""
    height, width = d.pick((4, 4), (4, 6))
    return {
        "hidden_states": d.latents(height * width, channels),
        "encoder_hidden_states": d.cond(TEXT, 24),
        "timestep": d.time(),
        "img_ids": grid_ids(height, width, axes),
        "txt_ids": torch.zeros(TEXT, axes),
    }


SIZE = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 24}
FLUX = {
    **SIZE,
    "in_channels": 4,
    "num_layers": 3,
    "num_single_layers": 4,
    "pooled_projection_dim": 12,
    "axes_dims_rope": (4, 6, 6),
}


def flux(d: Draw, guidance: bool = False, hints: bool = False, single_name: str = "") -> Inputs:
    kwargs = {**packed(d), "pooled_projections": d.cond(12)}
    if guidance:
        kwargs["guidance"] = d.fill(3.5)
    if hints:
        tokens = kwargs["hidden_states"].shape[1]
        kwargs["controlnet_block_samples"] = [d.cond(tokens, DIM) * 0.3 for _ in range(3)]
        kwargs["controlnet_single_block_samples"] = [d.cond(tokens, DIM) * 0.3 for _ in range(2)]
    return kwargs


flux_case = partial(case, cls="FluxTransformer2DModel", times=UNIT, unbatched=IDS)
flux_case("flux", config=FLUX)(flux)
flux_case("flux-guidance", config={**FLUX, "guidance_embeds": True})(partial(flux, guidance=True))
flux_case("flux-control", config=FLUX)(partial(flux, hints=True))


@case("flux-kontext", "FluxTransformer2DModel", FLUX, times=UNIT, unbatched=IDS)
def flux_kontext(d: Draw) -> Inputs:
    """Reference image tokens follow the latents in one sequence and move with them here."""
    kwargs = flux(d)
    reference = grid_ids(2, 4)
    reference[:, 0] = 1
    tokens = kwargs["hidden_states"].shape[1] + len(reference)
    return {
        **kwargs,
        "hidden_states": d.latents(tokens, 4),
        "img_ids": torch.cat([kwargs["img_ids"], reference]),
    }


CHROMA = {
    **SIZE,
    "in_channels": 4,
    "num_layers": 3,
    "num_single_layers": 4,
    "axes_dims_rope": (4, 6, 6),
    "approximator_num_channels": 16,
    "approximator_hidden_dim": 32,
    "approximator_layers": 2,
}


@case("chroma", "ChromaTransformer2DModel", CHROMA, times=UNIT, unbatched=IDS)
def chroma(d: Draw) -> Inputs:
    kwargs = packed(d)
    tokens = TEXT + kwargs["hidden_states"].shape[1]
    return {**kwargs, "attention_mask": d.ones(tokens, dtype=torch.bool)}


@case("chroma-control", "ChromaTransformer2DModel", CHROMA, times=UNIT, unbatched=IDS)
def chroma_control(d: Draw) -> Inputs:
    """Hints are written into the outputs of the single-stream blocks in place."""
    kwargs = chroma(d)
    tokens = kwargs["hidden_states"].shape[1]
    return {
        **kwargs,
        "controlnet_block_samples": [d.cond(tokens, DIM) * 0.3 for _ in range(3)],
        "controlnet_single_block_samples": [d.cond(tokens, DIM) * 0.3 for _ in range(2)],
    }


LONGCAT = {**FLUX, "pooled_projection_dim": 24}
case("longcat-image", "LongCatImageTransformer2DModel", LONGCAT, times=UNIT, unbatched=IDS)(packed)

OVIS = {key: value for key, value in FLUX.items() if key != "pooled_projection_dim"} | {"out_channels": 4}
case("ovis-image", "OvisImageTransformer2DModel", OVIS, times=UNIT, unbatched=IDS)(packed)

BRIA = {**FLUX, "pooled_projection_dim": None, "axes_dims_rope": [4, 6, 6]}
case("bria", "BriaTransformer2DModel", BRIA, unbatched=IDS)(packed)


@case("bria-control", "BriaTransformer2DModel", BRIA, unbatched=IDS)
def bria_control(d: Draw) -> Inputs:
    kwargs = packed(d)
    tokens = kwargs["hidden_states"].shape[1]
    return {**kwargs, "controlnet_block_samples": [d.cond(tokens, DIM) * 0.3 for _ in range(2)]}


@case("bria-fibo", "BriaFiboTransformer2DModel", {**BRIA, "text_encoder_dim": 20}, unbatched=IDS)
def bria_fibo(d: Draw) -> Inputs:
    """Half of the text stream is replaced by another text encoder layer before every block."""
    kwargs = packed(d)
    layers = BRIA["num_layers"] + BRIA["num_single_layers"]
    return {**kwargs, "text_encoder_layers": [d.cond(TEXT, 20) for _ in range(layers)]}


FLUX2 = {
    **SIZE,
    "in_channels": 4,
    "num_layers": 3,
    "num_single_layers": 4,
    "timestep_guidance_channels": 16,
    "axes_dims_rope": (4, 4, 4, 4),
}


def flux2(d: Draw, guidance: bool) -> Inputs:
    kwargs = packed(d, axes=4)
    return {**kwargs, "guidance": d.fill(4.0)} if guidance else kwargs


flux2_case = partial(case, cls="Flux2Transformer2DModel", times=UNIT, unbatched=IDS)
flux2_case("flux2", config={**FLUX2, "guidance_embeds": False})(partial(flux2, guidance=False))
flux2_case("flux2-guidance", config={**FLUX2, "guidance_embeds": True})(partial(flux2, guidance=True))

FLUX3 = {
    **SIZE,
    "in_channels": 4,
    "cond_in_channels": 4,
    "num_layers": 3,
    "num_single_layers": 4,
    "timestep_channels": 16,
    "axes_dims_rope": (4, 4, 4, 4),
}
flux3_case = partial(case, cls="Flux3Transformer2DModel", times=UNIT, unbatched=IDS)
flux3_case("flux3", config=FLUX3)(partial(packed, axes=4))


@flux3_case("flux3-image-condition", config=FLUX3)
def flux3_image_condition(d: Draw) -> Inputs:
    ids = grid_ids(2, 2, 4)
    ids[:, 0] = 1
    return {**packed(d, axes=4), "image_cond_hidden_states": d.cond(4, 4), "image_cond_ids": ids}


@flux3_case("flux3-flow-map", config={**FLUX3, "flow_map": True})
def flux3_flow_map(d: Draw) -> Inputs:
    return {**packed(d, axes=4), "target_timestep": d.fill(0.01)}
