"""Double-stream transformers on image latents: SD3, Qwen-Image, AuraFlow, HiDream and others."""

from __future__ import annotations

from functools import partial

import torch

from ..case import RISING, THOUSAND, UNIT, Draw, Inputs, case

TEXT = 5


def image(d: Draw, channels: int = 4) -> Inputs:
    """Unpacked latents, text and a timestep."""
    height, width = d.pick((8, 8), (8, 12))
    return {
        "hidden_states": d.latents(channels, height, width),
        "encoder_hidden_states": d.cond(TEXT, 24),
        "timestep": d.time(),
    }


SD3 = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 12,
    "pos_embed_max_size": 12,
}


def sd3(d: Draw, hints: bool = False) -> Inputs:
    kwargs = {**image(d), "pooled_projections": d.cond(12)}
    if hints:
        tokens = d.pick(16, 24)
        kwargs["block_controlnet_hidden_states"] = [d.cond(tokens, 32) * 0.3 for _ in range(2)]
    return kwargs


case("sd3", "SD3Transformer2DModel", SD3)(sd3)
SD35 = {**SD3, "dual_attention_layers": (0, 1), "qk_norm": "rms_norm"}
case("sd35-dual-attention", "SD3Transformer2DModel", SD35)(sd3)
case("sd3-control", "SD3Transformer2DModel", SD3)(partial(sd3, hints=True))


@case("sd3-skip-layers", "SD3Transformer2DModel", SD3)
def sd3_skip_layers(d: Draw) -> Inputs:
    """Skip-layer guidance: the pipeline leaves one block out in one of its calls."""
    kwargs = sd3(d)
    return {**kwargs, "skip_layers": [1]}


AURAFLOW = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_mmdit_layers": 3,
    "num_single_dit_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "caption_projection_dim": 32,
    "pos_embed_max_size": 64,
}
case("auraflow", "AuraFlowTransformer2DModel", AURAFLOW, times=UNIT)(image)

QWEN = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 1,
    "num_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}
QWEN_JOINED = frozenset({"img_shapes"})


def qwen(d: Draw, edit: bool = False, hints: bool = False) -> Inputs:
    height, width = d.pick((4, 4), (4, 6))
    shapes = [(1, height, width), (1, 2, 4)] if edit else [(1, height, width)]
    tokens = sum(t * h * w for t, h, w in shapes)
    kwargs = {
        "hidden_states": d.latents(tokens, 4),
        "encoder_hidden_states": d.cond(TEXT, 24),
        "encoder_hidden_states_mask": d.ones(TEXT, dtype=torch.long),
        "timestep": d.time(),
        "img_shapes": [shapes] * d.batch,
    }
    if hints:
        kwargs["controlnet_block_samples"] = [d.cond(tokens, 32) * 0.3 for _ in range(2)]
    return kwargs


qwen_case = partial(case, cls="QwenImageTransformer2DModel", times=UNIT, joined=QWEN_JOINED)
qwen_case("qwen-image", config=QWEN)(qwen)
qwen_case("qwen-image-control", config=QWEN)(partial(qwen, hints=True))
qwen_case("qwen-image-edit", config={**QWEN, "zero_cond_t": True})(partial(qwen, edit=True))

QWEN21 = {
    "patch_size": 1,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "context_in_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}


def qwen21(d: Draw) -> Inputs:
    """One slot of the text sequence holds 2x2 image tokens; the output is that of the whole joint sequence."""
    height, width = d.pick((4, 4), (4, 6))
    slots = height * width // 4
    mask = torch.cat([torch.zeros(TEXT), torch.ones(slots)]).bool()
    return {
        "hidden_states": d.latents(height * width, 4),
        "encoder_hidden_states": d.cond(TEXT, 24),
        "timestep": d.time(),
        "img_shapes": [[(1, height, width)]] * d.batch,
        "img_mask": mask.expand(d.batch, -1),
    }


qwen21_case = partial(case, cls="QwenImage21Transformer2DModel", times=UNIT, joined=QWEN_JOINED)
qwen21_case("qwen-image-21", config=QWEN21)(qwen21)
qwen21_case("qwen-image-21-not-causal", config={**QWEN21, "causal_condition": False})(qwen21)

NUCLEUS = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 1,
    "num_layers": 5,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 6, 6),
    "num_experts": 4,
    "moe_intermediate_dim": 16,
    "capacity_factors": [4.0] * 5,
}


@case(
    "nucleus-moe",
    "NucleusMoEImageTransformer2DModel",
    NUCLEUS,
    times=UNIT,
    joined=QWEN_JOINED,
)
def nucleus(d: Draw) -> Inputs:
    height, width = d.pick((4, 4), (4, 6))
    return {
        "hidden_states": d.latents(height * width, 4),
        "encoder_hidden_states": d.cond(TEXT, 24),
        "encoder_hidden_states_mask": d.ones(TEXT, dtype=torch.bool),
        "timestep": d.time(),
        "img_shapes": [(1, height, width)] * d.batch,
    }


HIDREAM = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "num_single_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "caption_channels": [24, 20],
    "text_emb_dim": 12,
    "num_routed_experts": 2,
    "num_activated_experts": 2,
    "axes_dims_rope": (4, 6, 6),
    "max_resolution": (16, 16),
    "llama_layers": [0, 1, 1, 0, 0, 1, 0],
    "force_inference_output": True,
}


@case("hidream", "HiDreamImageTransformer2DModel", HIDREAM, timestep_name="timesteps")
def hidream(d: Draw) -> Inputs:
    """Text is appended to the image tokens before every block and cut off after it."""
    height, width = d.pick((8, 8), (8, 12))
    return {
        "hidden_states": d.latents(4, height, width),
        "timesteps": d.time(),
        "encoder_hidden_states_t5": d.cond(TEXT, 24),
        "encoder_hidden_states_llama3": torch.stack([d.cond(TEXT, 20) for _ in range(2)]).unbind(0),
        "pooled_embeds": d.cond(12),
    }


COGVIEW = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 4,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "text_embed_dim": 24,
    "time_embed_dim": 16,
    "condition_dim": 4,
}


def cogview(d: Draw) -> Inputs:
    height, width = d.pick((8, 8), (8, 12))
    size = torch.tensor([[height * 8.0, width * 8.0]]).repeat(d.batch, 1)
    return {**image(d), "original_size": size, "target_size": size, "crop_coords": torch.zeros(d.batch, 2)}


COGVIEW3 = {**COGVIEW, "sample_size": 8, "pos_embed_max_size": 12}
case("cogview3plus", "CogView3PlusTransformer2DModel", COGVIEW3)(cogview)
COGVIEW4 = {**COGVIEW, "sample_size": 8, "rope_axes_dim": (8, 8)}
case("cogview4", "CogView4Transformer2DModel", COGVIEW4)(cogview)

GLM = {**COGVIEW, "prior_vq_quantizer_codebook_size": 16}


@case("glm-image", "GlmImageTransformer2DModel", GLM)
def glm_image(d: Draw) -> Inputs:
    kwargs = cogview(d)
    del kwargs["original_size"]
    tokens = d.pick(16, 24)
    return {
        **kwargs,
        "prior_token_id": d.ints(16, tokens),
        "prior_token_drop": torch.zeros(d.batch, tokens, dtype=torch.bool),
    }


ERNIE = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_layers": 4,
    "ffn_hidden_size": 48,
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 1,
    "text_in_dim": 24,
    "rope_axes_dim": (4, 6, 6),
}


@case("ernie-image", "ErnieImageTransformer2DModel", ERNIE)
def ernie(d: Draw) -> Inputs:
    """Blocks work on `[tokens, batch, channels]`."""
    height, width = d.pick((4, 4), (4, 6))
    return {
        "hidden_states": d.latents(4, height, width),
        "timestep": d.time(),
        "text_bth": d.cond(TEXT, 24),
        "text_lens": torch.full((d.batch,), TEXT),
    }


PRX = {
    "in_channels": 4,
    "patch_size": 2,
    "context_in_dim": 24,
    "hidden_size": 32,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 4,
    "axes_dim": [8, 8],
}
case("prx", "PRXTransformer2DModel", PRX, times=UNIT)(image)

KREA2 = {
    "in_channels": 4,
    "num_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "timestep_embed_dim": 16,
    "text_hidden_dim": 24,
    "num_text_layers": 3,
    "text_num_attention_heads": 2,
    "text_num_key_value_heads": 2,
    "text_intermediate_size": 32,
    "num_layerwise_text_blocks": 2,
    "num_refiner_text_blocks": 2,
    "axes_dims_rope": (4, 6, 6),
}


@case("krea2", "Krea2Transformer2DModel", KREA2, times=UNIT, unbatched=frozenset({"position_ids"}), gain=0.5)
def krea2(d: Draw) -> Inputs:
    height, width = d.pick((4, 4), (4, 6))
    positions = torch.zeros(TEXT + height * width, 3)
    positions[TEXT:, 1:] = torch.cartesian_prod(torch.arange(height), torch.arange(width)).float()
    return {
        "hidden_states": d.latents(height * width, 4),
        "encoder_hidden_states": d.cond(TEXT, 3, 24),
        "timestep": d.time(),
        "position_ids": positions,
    }


IDEOGRAM4 = {
    "in_channels": 4,
    "num_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "adaln_dim": 16,
    "llm_features_dim": 24,
    "mrope_section": (4, 2, 2),
}


@case("ideogram4", "Ideogram4Transformer2DModel", IDEOGRAM4, times=RISING)
def ideogram4(d: Draw) -> Inputs:
    """Text and image share one sequence; an indicator says which token is which."""
    height, width = d.pick((4, 4), (4, 6))
    tokens = TEXT + height * width
    positions = torch.zeros(tokens, 3, dtype=torch.long)
    positions[:TEXT] = torch.arange(TEXT)[:, None]
    positions[TEXT:, 1:] = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    positions[TEXT:, 0] = TEXT
    indicator = torch.tensor([3] * TEXT + [2] * (height * width))
    return {
        "hidden_states": d.latents(tokens, 4),
        "timestep": d.time(),
        "encoder_hidden_states": d.cond(tokens, 24),
        "position_ids": positions.expand(d.batch, -1, -1),
        "segment_ids": torch.ones(d.batch, tokens, dtype=torch.long),
        "indicator": indicator.expand(d.batch, -1),
    }


JOY = {
    "patch_size": [1, 2, 2],
    "in_channels": 4,
    "out_channels": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "text_dim": 24,
    "mlp_width_ratio": 2.0,
    "num_layers": 4,
    "rope_dim_list": [4, 6, 6],
}


@case("joyimage-edit", "JoyImageEditTransformer3DModel", JOY, times=THOUSAND)
def joyimage_edit(d: Draw) -> Inputs:
    """`[batch, items, channels, frames, height, width]`: the edited image is the last item, references come before."""
    height, width = d.pick((8, 8), (8, 12))
    return {
        "hidden_states": d.latents(2, 4, 1, height, width),
        "timestep": d.time(),
        "encoder_hidden_states": d.cond(TEXT, 24),
    }


@case(
    "joyimage-edit-plus",
    "JoyImageEditPlusTransformer3DModel",
    JOY,
    times=THOUSAND,
    joined=frozenset({"shape_list"}),
)
def joyimage_edit_plus(d: Draw) -> Inputs:
    """Patches of several images in one padded sequence."""
    height, width = d.pick((4, 4), (4, 6))
    return {
        "hidden_states": d.latents(height * width + 4 + 2, 4, 1, 2, 2),
        "timestep": d.time(),
        "encoder_hidden_states": d.cond(TEXT, 24),
        "encoder_hidden_states_mask": d.ones(TEXT),
        "shape_list": [[(1, height, width), (1, 2, 2)]] * d.batch,
    }
