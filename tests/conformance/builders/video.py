"""Video denoisers: CogVideoX, Latte, LTX, Mochi, Cosmos and others."""

from __future__ import annotations

from functools import partial

import torch

from ..case import UNIT, Draw, Inputs, case

TEXT = 5


def video(d: Draw, channels: int = 4, frames: int = 2) -> Inputs:
    """`[batch, channels, frames, height, width]` latents, text and a timestep."""
    height, width = d.pick((4, 8), (8, 8))
    return {
        "hidden_states": d.latents(channels, frames, height, width),
        "encoder_hidden_states": d.cond(TEXT, 24),
        "timestep": d.time(),
    }


COGVIDEOX = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 24,
    "num_layers": 4,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 5,
    "patch_size": 2,
    "max_text_seq_length": TEXT,
}


def frames_first(d: Draw, channels: int = 4, frames: int = 2) -> Inputs:
    """CogVideoX counts frames before channels, and its text has a fixed length."""
    kwargs = video(d, channels, frames)
    return {**kwargs, "hidden_states": kwargs["hidden_states"].transpose(1, 2).contiguous()}


def rotary(tokens: int, dim: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(tokens).float(), 1 / 100 ** torch.linspace(0, 1, dim // 2))
    angles = angles.repeat_interleave(2, dim=1)
    return angles.cos(), angles.sin()


cogvideox_case = partial(case, cls="CogVideoXTransformer3DModel", unbatched=frozenset({"image_rotary_emb"}))
cogvideox_case("cogvideox", config=COGVIDEOX)(frames_first)


@cogvideox_case(
    "cogvideox-15",
    config={
        **COGVIDEOX,
        "patch_size_t": 2,
        "patch_bias": False,
        "use_rotary_positional_embeddings": True,
        "ofs_embed_dim": 8,
    },
)
def cogvideox_15(d: Draw) -> Inputs:
    kwargs = frames_first(d)
    return {**kwargs, "image_rotary_emb": rotary(d.pick(8, 16)), "ofs": d.fill(2.0)}


CONSISID = {
    **COGVIDEOX,
    "num_attention_heads": 3,
    "is_train_face": True,
    "cross_attn_interval": 2,
    "cross_attn_dim_head": 16,
    "cross_attn_num_heads": 2,
    "LFE_id_dim": 8,
    "LFE_vit_dim": 8,
    "LFE_depth": 5,
    "LFE_dim_head": 8,
    "LFE_num_heads": 2,
    "LFE_num_id_token": 1,
    "LFE_num_querie": 2,
    "LFE_output_dim": 32,
    "LFE_ff_mult": 1,
    "LFE_num_scale": 5,
}


@case("consisid", "ConsisIDTransformer3DModel", CONSISID)
def consisid(d: Draw) -> Inputs:
    """Face blocks from a second list run between the blocks of the first."""
    return {**frames_first(d), "id_cond": d.cond(8), "id_vit_hidden": [d.cond(2, 8) for _ in range(5)]}


LATTE = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 4,
    "cross_attention_dim": 32,
    "attention_bias": True,
    "sample_size": 8,
    "patch_size": 2,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "caption_channels": 24,
    "video_length": 3,
}


@case("latte", "LatteTransformer3DModel", LATTE)
def latte(d: Draw) -> Inputs:
    """Spatial and temporal blocks alternate, with the batch folded into frames or into tokens."""
    return video(d, frames=3)


ALLEGRO = {
    "patch_size": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 4,
    "cross_attention_dim": 24,
    "sample_height": 8,
    "sample_width": 8,
    "sample_frames": 2,
    "caption_channels": 24,
}


@case("allegro", "AllegroTransformer3DModel", ALLEGRO, unbatched=frozenset({"image_rotary_emb"}))
def allegro(d: Draw) -> Inputs:
    height, width = d.pick((2, 4), (4, 4))
    grid = torch.cartesian_prod(torch.arange(2), torch.arange(height), torch.arange(width)).T[:, None]
    angles = torch.outer(torch.arange(8).float(), 1 / 100 ** torch.linspace(0, 1, 2)).repeat(1, 2)
    return {
        **video(d),
        "attention_mask": d.ones(2, 2 * height, 2 * width),
        "encoder_attention_mask": d.ones(TEXT),
        "image_rotary_emb": (((angles.cos(), angles.sin()),) * 3, tuple(grid)),
    }


MOCHI = {
    "patch_size": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 4,
    "pooled_projection_dim": 16,
    "in_channels": 4,
    "text_embed_dim": 24,
    "time_embed_dim": 8,
    "max_sequence_length": TEXT,
}


@case("mochi", "MochiTransformer3DModel", MOCHI)
def mochi(d: Draw) -> Inputs:
    return {**video(d), "encoder_attention_mask": d.ones(TEXT, dtype=torch.bool)}


LTX = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "cross_attention_dim": 32,
    "num_layers": 4,
    "caption_channels": 24,
}


def ltx(d: Draw, per_token: bool = False) -> Inputs:
    frames, height, width = 2, 2, d.pick(4, 6)
    tokens = frames * height * width
    time = d.time(tokens) if per_token else d.time()
    if per_token:
        time[:, : height * width] = 0  # the first frame is a clean image
    return {
        "hidden_states": d.latents(tokens, 4),
        "encoder_hidden_states": d.cond(TEXT, 24),
        "timestep": time,
        "encoder_attention_mask": d.ones(TEXT),
        "num_frames": frames,
        "height": height,
        "width": width,
    }


case("ltx-video", "LTXVideoTransformer3DModel", LTX)(ltx)
case("ltx-video-per-token-time", "LTXVideoTransformer3DModel", LTX)(partial(ltx, per_token=True))

LTX2 = {
    **LTX,
    "audio_in_channels": 4,
    "audio_out_channels": 4,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 16,
    "rope_double_precision": False,
}


def ltx2(d: Draw, cross_attn_mod: bool = False) -> Inputs:
    """Video and audio streams in one block call; both are predicted."""
    frames, height, width, audio = 2, 2, d.pick(4, 6), 6
    kwargs = {
        "hidden_states": d.latents(frames * height * width, 4),
        "audio_hidden_states": d.latents(audio, 4),
        "encoder_hidden_states": d.cond(TEXT, 24),
        "audio_encoder_hidden_states": d.cond(TEXT, 24),
        "timestep": d.time(),
        "audio_timestep": d.time(),
        "encoder_attention_mask": d.ones(TEXT),
        "audio_encoder_attention_mask": d.ones(TEXT),
        "num_frames": frames,
        "height": height,
        "width": width,
        "audio_num_frames": audio,
        "fps": 25.0,
    }
    if cross_attn_mod:
        kwargs["sigma"] = d.time()
    return kwargs


ltx2_case = partial(case, cls="LTX2VideoTransformer3DModel", more_latents=("audio_hidden_states",))
ltx2_case("ltx2", config=LTX2, more_times=("audio_timestep",))(ltx2)
ltx2_case(
    "ltx2-modulated-prompt",
    config={**LTX2, "cross_attn_mod": True, "audio_cross_attn_mod": True, "gated_attn": True, "audio_gated_attn": True},
    more_times=("audio_timestep", "sigma"),
)(partial(ltx2, cross_attn_mod=True))

COSMOS = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 4,
    "mlp_ratio": 2,
    "text_embed_dim": 24,
    "adaln_lora_dim": 4,
    "max_size": (4, 16, 16),
    "extra_pos_embed_type": "learnable",
    "concat_padding_mask": False,  # needs torchvision
}


def cosmos(d: Draw, hints: bool = False) -> Inputs:
    kwargs = {**video(d), "fps": 16}
    if hints:
        tokens = kwargs["hidden_states"][0, 0].numel() // 4
        kwargs["block_controlnet_hidden_states"] = [d.cond(tokens, 32) * 0.3 for _ in range(2)]
    return kwargs


cosmos_case = partial(case, cls="CosmosTransformer3DModel", times=UNIT)
cosmos_case("cosmos", config=COSMOS)(cosmos)
cosmos_case("cosmos-control", config={**COSMOS, "controlnet_block_every_n": 2})(partial(cosmos, hints=True))


@cosmos_case("cosmos-video-to-world", config={**COSMOS, "in_channels": 5, "extra_pos_embed_type": None})
def cosmos_video_to_world(d: Draw) -> Inputs:
    """The first frame is given: time 0 there, and a mask channel marks it."""
    kwargs = cosmos(d)
    frames, height, width = kwargs["hidden_states"].shape[2:]
    mask = torch.zeros(d.batch, 1, frames, height, width)
    mask[:, :, 0] = 1
    time = d.time(1, frames, 1, 1)
    time[:, :, 0] = 0
    return {**kwargs, "condition_mask": mask, "timestep": time}


EASYANIMATE = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 2,
    "sample_width": 8,
    "sample_height": 8,
    "num_layers": 4,
    "mmdit_layers": 2,
    "time_embed_dim": 8,
    "text_embed_dim": 24,
}
case("easyanimate", "EasyAnimateTransformer3DModel", EASYANIMATE)(video)


@case("easyanimate-inpaint", "EasyAnimateTransformer3DModel", {**EASYANIMATE, "in_channels": 9})
def easyanimate_inpaint(d: Draw) -> Inputs:
    kwargs = video(d)
    return {**kwargs, "inpaint_latents": d.cond(5, *kwargs["hidden_states"].shape[2:])}


MOTIF = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 3,
    "num_single_layers": 5,
    "mlp_ratio": 2.0,
    "text_embed_dim": 24,
    "rope_axes_dim": (4, 6, 6),
}
motif_case = partial(case, cls="MotifVideoTransformer3DModel")
motif_case("motif-video", config=MOTIF)(video)


@motif_case("motif-video-decoder", config={**MOTIF, "num_decoder_layers": 2, "image_embed_dim": 12})
def motif_video_decoder(d: Draw) -> Inputs:
    """The last blocks decode a copy of the patch embedding, with the encoder's output as their text."""
    return {**video(d), "encoder_attention_mask": d.ones(TEXT), "image_embeds": d.cond(3, 12)}
