"""Lumina, Z-Image, OmniGen and the other models with refiner stacks or lists of images."""

from __future__ import annotations

from functools import partial

import torch

from ..case import RISING, UNIT, Draw, Inputs, case
from .mmdit import image

TEXT = 5
ZIMAGE = {
    "in_channels": 4,
    "dim": 32,
    "n_layers": 4,
    "n_refiner_layers": 2,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 24,
    "axes_dims": [4, 6, 6],
    "axes_lens": [256, 64, 64],
}
z_case = partial(
    case,
    cls="ZImageTransformer2DModel",
    latent_name="x",
    timestep_name="t",
    times=RISING,
    joined=frozenset({"x", "cap_feats", "siglip_feats"}),
)


def z_image(d: Draw, hints: bool = False) -> Inputs:
    """Lists with one image and one prompt a sample; the time is that of the clean image, 0 to 1."""
    height, width = d.pick((8, 8), (8, 12))
    kwargs = {
        "x": list(d.latents(4, 1, height, width)),
        "t": d.time(),
        "cap_feats": list(d.cond(TEXT, 24)),
    }
    if hints:
        kwargs["controlnet_block_samples"] = {0: d.cond(64, 32) * 0.3, 2: d.cond(64, 32) * 0.3}
    return kwargs


z_case("z-image", config=ZIMAGE)(z_image)
z_case("z-image-control", config=ZIMAGE, has_sizes=False)(partial(z_image, hints=True))


@z_case("z-image-omni", config={**ZIMAGE, "siglip_feat_dim": 12}, supports_batch=False, batch_note="nested lists")
def z_image_omni(d: Draw) -> Inputs:
    """Several images a sample: the last one is generated, the others are given; one noise flag an image."""
    height, width = d.pick((8, 8), (8, 12))
    return {
        "x": [[d.latents(4, 1, 8, 8)[0], d.latents(4, 1, height, width)[0]]],
        "t": d.time(),
        "cap_feats": [[d.cond(TEXT, 24)[0], d.cond(3, 24)[0], d.cond(2, 24)[0]]],
        "siglip_feats": [[d.cond(2, 2, 12)[0], None]],
        "image_noise_mask": [[0, 1]],
    }


LUMINA2 = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "hidden_size": 32,
    "num_layers": 4,
    "num_refiner_layers": 2,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
    "multiple_of": 16,
    "axes_dim_rope": (4, 6, 6),
    "axes_lens": (64, 64, 64),
    "cap_feat_dim": 24,
}


@case("lumina2", "Lumina2Transformer2DModel", LUMINA2, times=RISING)
def lumina2(d: Draw) -> Inputs:
    return {**image(d), "encoder_attention_mask": d.ones(TEXT, dtype=torch.bool)}


LUMINA_NEXT = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "hidden_size": 32,
    "num_layers": 4,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
    "multiple_of": 16,
    "cross_attention_dim": 24,
}


@case(
    "lumina-next",
    "LuminaNextDiT2DModel",
    LUMINA_NEXT,
    times=RISING,
    unbatched=frozenset({"image_rotary_emb", "cross_attention_kwargs"}),
)
def lumina_next(d: Draw) -> Inputs:
    angles = torch.outer(torch.arange(64).float(), 1 / 100 ** torch.linspace(0, 1, 8)).view(8, 8, 8)
    return {
        **image(d),
        "encoder_mask": d.ones(TEXT),
        "image_rotary_emb": torch.polar(torch.ones_like(angles), angles),
        "cross_attention_kwargs": {},
    }


OMNIGEN = {
    "in_channels": 4,
    "patch_size": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "num_layers": 4,
    "pad_token_id": 0,
    "vocab_size": 64,
    "rope_scaling": {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8, "type": "su"},
    "pos_embed_max_size": 16,
    "time_step_dim": 16,
}


@case("omnigen", "OmniGenTransformer2DModel", OMNIGEN, times=RISING, unbatched=frozenset({"input_img_latents"}))
def omnigen(d: Draw) -> Inputs:
    """One language-model stack over text tokens, a time token and image tokens."""
    height, width = d.pick((8, 8), (8, 12))
    tokens = TEXT + 1 + height * width // 4
    return {
        "hidden_states": d.latents(4, height, width),
        "timestep": d.time(),
        "input_ids": d.ints(64, TEXT),
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": d.ones(tokens, tokens),
        "position_ids": torch.arange(tokens).expand(d.batch, -1),
    }


FIBO2 = {
    "in_channels": 4,
    "patch_size": 2,
    "dim": 32,
    "n_layers": 5,
    "n_refiner_layers": 2,
    "n_heads": 2,
    "cap_feat_dim": 24,
    "injection_layer_ids": (1, 3),
    "perceiver_num_layers": 2,
    "min_num_gist_tokens": 4,
    "max_num_gist_tokens": 8,
    "gist_step": 4,
    "gist_min_text_len": 4,
    "gist_max_text_len": 16,
    "axes_dims": (4, 6, 6),
    "axes_lens": (64, 64, 64),
}


def fibo2(d: Draw, context: bool = False) -> Inputs:
    """Text is compressed to gist tokens, and enters some blocks once more as an argument."""
    kwargs = image(d)
    kwargs["encoder_hidden_states"] = d.cond(3, 6, 24)
    kwargs["encoder_attention_mask"] = d.ones(6, dtype=torch.bool)
    if context:
        kwargs["context_latents"] = [d.cond(4, 4, 4)]
    return kwargs


fibo2_case = partial(case, cls="BriaFibo2Transformer2DModel", times=UNIT, gain=0.6)
fibo2_case("bria-fibo2", config=FIBO2)(fibo2)
fibo2_case("bria-fibo2-context", config=FIBO2)(partial(fibo2, context=True))
