"""The Kandinsky transformers: channels last, text blocks before visual blocks."""

from __future__ import annotations

import torch

from ..case import Draw, Inputs, case

TEXT = 5
SHARED = frozenset({"visual_rope_pos", "text_rope_pos"})
SIZE = {"in_text_dim": 24, "in_text_dim2": 12, "time_dim": 16, "patch_size": (1, 2, 2), "model_dim": 32}
K5 = {
    **SIZE,
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "ff_dim": 48,
    "num_text_blocks": 2,
    "num_visual_blocks": 4,
    "axes_dims": (4, 6, 6),
}


def channels_last(d: Draw, channels: int) -> Inputs:
    height, width = d.pick((4, 8), (8, 8))
    return {
        "hidden_states": d.latents(2, height, width, channels),
        "encoder_hidden_states": d.cond(TEXT, 24),
        "timestep": d.time(),
        "pooled_projections": d.cond(12),
    }


def ranges(kwargs: Inputs) -> list[torch.Tensor]:
    frames, height, width = kwargs["hidden_states"].shape[1:4]
    return [torch.arange(frames), torch.arange(height // 2), torch.arange(width // 2)]


@case("kandinsky5", "Kandinsky5Transformer3DModel", K5, unbatched=SHARED)
def kandinsky5(d: Draw) -> Inputs:
    kwargs = channels_last(d, 4)
    return {**kwargs, "visual_rope_pos": ranges(kwargs), "text_rope_pos": torch.arange(TEXT)}


@case(
    "kandinsky5-visual-condition",
    "Kandinsky5Transformer3DModel",
    {**K5, "visual_cond": True},
    unbatched=SHARED,
    gain=0.5,
)
def kandinsky5_cond(d: Draw) -> Inputs:
    """Latents, their condition and a mask share the channels."""
    kwargs = channels_last(d, 9)
    return {**kwargs, "visual_rope_pos": ranges(kwargs), "text_rope_pos": torch.arange(TEXT)}


K6 = {
    **K5,
    "visual_cond": False,
    "in_audio_dim": 4,
    "out_audio_dim": 4,
    "model_dim_a": 32,
    "time_dim_a": 16,
    "ff_dim_a": 48,
    "axes_dims_a": (4, 6, 6),
}


@case("kandinsky6", "Kandinsky6Transformer3DModel", K6, more_latents=("audio_hidden_states",), gain=0.5)
def kandinsky6(d: Draw) -> Inputs:
    """Video and audio in one block call."""
    return {**channels_last(d, 4), "audio_hidden_states": d.latents(6, 4)}


@case("kandinsky6-video-only", "Kandinsky6Transformer3DModel", K6, gain=0.5)
def kandinsky6_video_only(d: Draw) -> Inputs:
    """The blocks' audio stream is None."""
    return channels_last(d, 4)


K6_SR = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "time_dim": 16,
    "model_dim": 32,
    "ff_dim": 48,
    "num_visual_blocks": 4,
    "axes_dims": (4, 6, 6),
    "nabla_window": (3, 3, 3),
}


@case("kandinsky6-sr", "Kandinsky6SRTransformer3DModel", K6_SR, uses_conditioning=False)
def kandinsky6_sr(d: Draw) -> Inputs:
    return {"hidden_states": d.latents(1, *d.pick((8, 8), (8, 16)), 9), "timestep": d.time()}
