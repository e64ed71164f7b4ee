"""Denoisers with unusual inputs: key/value caches across calls, packed sequences without a batch, molecules."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ..case import RISING, THOUSAND, Draw, Inputs, case
from .video import LTX2, rotary, video
from .wan import WAN

TEXT = 5
ANIMATE2 = {
    "text_len": 8,
    "in_dim": 9,
    "dim": 32,
    "ffn_dim": 48,
    "freq_dim": 16,
    "text_dim": 24,
    "out_dim": 4,
    "num_heads": 2,
    "num_layers": 10,
    "use_img_emb": False,
}


def eager_block_mask(model: nn.Module) -> None:
    """Put the mask of the one geometry used here where the model keeps its masks: it would compile a kernel for it."""
    from torch.nn.attention.flex_attention import create_block_mask

    frames, per_frame = 2, 8
    start, length = 128, frames * per_frame

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = key < length + per_frame
        reference = (key >= start) & (key - start < length) & ((key - start) // per_frame + 1 == query // per_frame)
        return (query < length + per_frame) & (own | reference)

    mask = create_block_mask(visible, B=None, H=None, Q_LEN=128, KV_LEN=256, device="cpu")
    model.block_masks[(frames, per_frame)] = mask


@case(
    "wan-animate-2",
    "WanAnimate2Transformer3DModel",
    ANIMATE2,
    prepare=eager_block_mask,
    has_sizes=False,
    supports_batch=False,
    batch_note="the key/value cache belongs to one call",
)
def wan_animate2(d: Draw) -> Inputs:
    """Reads keys and values of a reference video; the unconditional branch leaves out block 9."""
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    cache = WanAnimate2KVCache(ANIMATE2["num_layers"])
    for index in range(ANIMATE2["num_layers"]):
        cache.get(index).store(d.shared(1, 16, 2, 16), d.shared(1, 16, 2, 16))
    return {
        "hidden_states": list(d.latents(4, 3, 4, 8)),
        "timestep": d.time(),
        "encoder_hidden_states": list(d.cond(TEXT, 24)),
        "condition_latents": list(d.cond(5, 3, 4, 8)),
        "kv_cache": cache,
        "kv_cache_mode": "cached",
        "seq_len": 24,
        "reference_grid_sizes": torch.tensor([[2, 2, 4]]),
        "origin_len": 5,
        "origin_area": (32, 64),
        "is_uncondtion": d.branch == 0,
    }


FAR = {**WAN, "chunk_partition": (1, 2)}


@case(
    "anyflow-far",
    "AnyFlowFARTransformer3DModel",
    FAR,
    supports_batch=False,
    batch_note="the batch is dimension 1 of the key/value caches",
)
def anyflow_far(d: Draw) -> Inputs:
    """The second chunk of a video, with keys and values of the first one from a cache."""
    kwargs = video(d)
    height, width = kwargs["hidden_states"].shape[-2:]
    tokens = height * width // 4
    caches = [
        {
            "full_cache": d.cond(2, 2, tokens, 16).transpose(0, 1),
            "compressed_cache": torch.zeros(2, 1, 2, 0, 16),
        }
        for _ in range(FAR["num_layers"])
    ]
    return {
        **kwargs,
        "hidden_states": kwargs["hidden_states"].transpose(1, 2).contiguous(),
        "timestep": d.time(2),
        "r_timestep": torch.zeros(1, 2),
        "chunk_partition": [1, 2],
        "kv_cache": dict(enumerate(caches)),
        "kv_cache_flag": {"num_cached_chunks": 1, "is_cache_step": False},
    }


COSMOS3 = {
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "latent_channel": 4,
    "latent_patch_size": 2,
    "patch_latent_dim": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "rope_axes_dim": [4, 2, 2],
    "vocab_size": 64,
}
cosmos3_case = partial(
    case,
    cls="Cosmos3OmniTransformer",
    latent_name="vision_tokens",
    timestep_name="vision_timesteps",
    supports_batch=False,
    batch_note="one sample is one packed sequence",
    gain=0.8,
)


def cosmos3(d: Draw, image: bool = False) -> Inputs:
    """Text and video are two streams of one packed sequence without a batch dimension."""
    frames, height, width = 2, 2, d.pick(2, 4)
    per_frame = height * width
    first = per_frame if image else 0  # tokens of a given first frame
    vision = torch.arange(TEXT, TEXT + frames * per_frame)
    length = TEXT + len(vision)
    positions = torch.arange(length).repeat(3, 1)
    positions[1, TEXT:] = torch.arange(height).repeat_interleave(width).repeat(frames)
    positions[2, TEXT:] = torch.arange(width).repeat(height * frames)
    return {
        "input_ids": d.ints(64, TEXT)[0],
        "text_indexes": torch.arange(TEXT),
        "position_ids": positions,
        "und_len": TEXT,
        "sequence_length": length,
        "vision_tokens": [d.latents(4, frames, 2 * height, 2 * width)],
        "vision_token_shapes": [(frames, height, width)],
        "vision_sequence_indexes": vision,
        "vision_mse_loss_indexes": vision[first:],
        "vision_timesteps": torch.ones(len(vision) - first),
        "vision_noisy_frame_indexes": [torch.arange(1 if image else 0, frames)],
    }


cosmos3_case("cosmos3", config=COSMOS3)(cosmos3)
cosmos3_case("cosmos3-image-to-video", config=COSMOS3)(partial(cosmos3, image=True))

SANA_WM = {
    "in_channels": 4,
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "softmax_every_n": 2,
    "linear_head_dim": 16,
    "caption_channels": 24,
    "mlp_ratio": 2.0,
    "chunk_plucker_channels": 8,
    "chunk_plucker_post_attn_blocks": 4,
}


@case("sana-wm", "SanaWMTransformer3DModel", SANA_WM)
def sana_wm(d: Draw) -> Inputs:
    """Linear and softmax attention in turn, a timestep a frame, and a camera path."""
    frames, height, width = 2, *d.pick((4, 4), (4, 6))
    pose = torch.eye(4).repeat(d.batch, frames, 1, 1)
    pose[..., 2, 3] = 0.1 * torch.arange(frames)
    lens = torch.tensor([width, height, width / 2, height / 2]).expand(d.batch, frames, 4)
    return {
        "hidden_states": d.latents(4, frames, height, width),
        "timestep": d.time(1, frames),
        "encoder_hidden_states": d.cond(1, TEXT, 24),
        "encoder_attention_mask": d.ones(TEXT, dtype=torch.long),
        "camera_conditions": torch.cat([pose.flatten(2), lens], dim=-1),
        "chunk_plucker": d.cond(8, frames, height, width),
    }


REFINER = {**LTX2, "audio_attention_head_dim": 4, "audio_cross_attention_dim": 8}


@case(
    "sana-wm-refiner",
    "SanaWMLTX2RefinerTransformer3DModel",
    REFINER,
    times=THOUSAND,
    unbatched=frozenset({"video_rotary_emb"}),
)
def sana_wm_refiner(d: Draw) -> Inputs:
    """The audio layers of LTX-2 are there and never called."""
    tokens = d.pick(8, 12)
    cos, sin = rotary(tokens, 32)
    return {
        "hidden_states": d.latents(tokens, 4),
        "encoder_hidden_states": d.cond(TEXT, 24),
        "timestep": d.time(tokens),
        "video_rotary_emb": (cos[None], sin[None]),
        "encoder_attention_mask": d.ones(TEXT),
    }


RFD4 = {
    "nlayers": 5,
    "token_dim": 32,
    "nheads": 2,
    "dim_cond": 16,
    "pair_repr_dim": 16,
    "latent_dim": 4,
    "token_type_emb_dim": 8,
    "t_emb_dim": 16,
    "xt_pair_dist_dim": 8,
    "feats_seq": ("xt_bb_ca", "xt_local_latents", "token_type"),
    "feats_cond_seq": ("time_emb_bb_ca", "time_emb_local_latents", "recycle_remaining"),
    "feats_pair_repr": ("xt_bb_ca_pair_dists",),
    "tri_mult_c": 16,
    "num_sequence_classes": 7,
    "recycle_conditioning_dim": 2,
}
rfd4_case = partial(
    case,
    cls="RFD4ProteinaTransformer",
    times=RISING,
    latent_name="bb_ca",
    timestep_name="bb_ca_time",
    more_latents=("local_latents",),
    more_times=("local_latents_time",),
    gain=0.5,
)


def rfd4(d: Draw, recycle: int = 0) -> Inputs:
    """Backbone coordinates and latents of a protein, in rising time."""
    residues = d.pick(8, 12)
    flags = d.ones(residues, dtype=torch.bool)
    return {
        "bb_ca": d.latents(residues, 3),
        "local_latents": d.latents(residues, 4),
        "bb_ca_time": d.time(),
        "local_latents_time": d.time(),
        "padding_mask": flags,
        "token_type": d.ints(7, residues),
        "conditioning": {"is_in_context_conditioning": ~flags, "supports_local_latent": flags},
        "recycle_depth": recycle,
    }


rfd4_case("rfd4-proteina", config=RFD4)(rfd4)
rfd4_case("rfd4-proteina-recycled", config=RFD4)(partial(rfd4, recycle=2))
