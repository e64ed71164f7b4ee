"""Wan and the models that share its blocks."""

from __future__ import annotations

from functools import partial

import torch

from ..case import THOUSAND, Draw, Inputs, case
from .video import video

BLOCKS = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 24,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 4,
}
WAN = {**BLOCKS, "rope_max_seq_len": 32}
case("wan-t2v", "WanTransformer3DModel", WAN)(video)


@case("wan-22-per-token-time", "WanTransformer3DModel", WAN)
def wan_per_token_time(d: Draw) -> Inputs:
    """Wan 2.2 5B: one timestep a token, 0 for the tokens of a given first frame."""
    kwargs = video(d)
    frames, height, width = kwargs["hidden_states"].shape[2:]
    per_frame = height * width // 4
    time = d.time(frames * per_frame)
    time[:, :per_frame] = 0
    return {**kwargs, "timestep": time}


def wan_image(d: Draw, channels: int = 4) -> Inputs:
    return {**video(d, channels), "encoder_hidden_states_image": d.cond(3, 12)}


IMAGE = {"image_dim": 12, "added_kv_proj_dim": 32}
case("wan-i2v", "WanTransformer3DModel", {**WAN, **IMAGE, "in_channels": 8})(partial(wan_image, channels=8))

case("chronoedit", "ChronoEditTransformer3DModel", {**WAN, **IMAGE})(wan_image)

VACE = {**WAN, "vace_layers": [0, 2], "vace_in_channels": 6}


@case("wan-vace", "WanVACETransformer3DModel", VACE, unbatched=frozenset({"control_hidden_states_scale"}))
def wan_vace(d: Draw) -> Inputs:
    """A second stack reads the latents and the control video; its hints are added between the blocks."""
    kwargs = video(d)
    return {
        **kwargs,
        "control_hidden_states": d.cond(6, *kwargs["hidden_states"].shape[2:]),
        "control_hidden_states_scale": torch.tensor([0.8, 0.8]),
    }


ANIMATE = {
    **WAN,
    "in_channels": 12,
    "latent_channels": 4,
    "image_dim": 12,
    "added_kv_proj_dim": 32,
    "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16},
    "motion_encoder_size": 16,
    "motion_style_dim": 8,
    "motion_dim": 4,
    "motion_encoder_dim": 16,
    "face_encoder_hidden_dim": 16,
    "face_encoder_num_heads": 2,
    "inject_face_latents_blocks": 2,
    "motion_encoder_batch_size": 2,
}


@case("wan-animate", "WanAnimateTransformer3DModel", ANIMATE)
def wan_animate(d: Draw) -> Inputs:
    """Face adapters run between the blocks."""
    kwargs = wan_image(d, 12)
    height, width = kwargs["hidden_states"].shape[-2:]
    return {
        **kwargs,
        "pose_hidden_states": d.cond(4, 1, height, width),
        "face_pixel_values": d.cond(3, 4, 16, 16).tanh(),
    }


@case("anyflow", "AnyFlowTransformer3DModel", WAN)
def anyflow(d: Draw) -> Inputs:
    """Frames come before channels, every frame has a timestep, and `r_timestep` is where the step ends."""
    kwargs = video(d)
    return {
        **kwargs,
        "hidden_states": kwargs["hidden_states"].transpose(1, 2).contiguous(),
        "timestep": d.time(2),
        "r_timestep": torch.zeros(d.batch, 2),
    }


HELIOS = {**BLOCKS, "rope_dim": (4, 6, 6)}


@case("helios", "HeliosTransformer3DModel", HELIOS)
def helios(d: Draw) -> Inputs:
    """History frames of three time scales stand before the latents, with time 0."""
    kwargs = video(d)
    height, width = kwargs["hidden_states"].shape[-2:]

    def frames(first: int, last: int) -> torch.Tensor:
        return torch.arange(first, last).expand(d.batch, -1)

    return {
        **kwargs,
        "indices_hidden_states": frames(7, 9),
        "latents_history_long": d.cond(4, 4, height, width),
        "indices_latents_history_long": frames(0, 4),
        "latents_history_mid": d.cond(4, 2, height, width),
        "indices_latents_history_mid": frames(4, 6),
        "latents_history_short": d.cond(4, 1, height, width),
        "indices_latents_history_short": frames(6, 7),
    }


@case("helios-no-history", "HeliosTransformer3DModel", {**HELIOS, "guidance_cross_attn": False})
def helios_no_history(d: Draw) -> Inputs:
    return video(d)


case("skyreels-v2", "SkyReelsV2Transformer3DModel", WAN)(video)


@case(
    "skyreels-v2-diffusion-forcing",
    "SkyReelsV2Transformer3DModel",
    {**WAN, "inject_sample_info": True, "num_frame_per_block": 1},
    times=THOUSAND,
    unbatched=frozenset({"fps"}),
    supports_batch=False,
    batch_note="the model repeats the fps embedding per frame only, and cannot add it to a batch of two",
)
def skyreels_forcing(d: Draw) -> Inputs:
    """Every latent frame has a timestep of its own; the first one is clean."""
    time = d.time(2)
    time[:, 0] = 0
    return {**video(d), "timestep": time, "enable_diffusion_forcing": True, "fps": [0]}
