"""Small components shared by the families: a byte tokenizer, text encoders, a VAE, the re-draw of constant weights."""

from __future__ import annotations

from typing import TypeVar

import torch
from diffusers import AutoencoderKL
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    AutoModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

M = TypeVar("M", bound=nn.Module)

TEXT_WIDTH = 16
"""Width of every text encoder here."""
TIMESTEP_PARTS = ("time", "t_embedder", "adaln", "norm", "guidance", "modulation")
"""Parts of the names of layers that turn the timestep into shifts, scales and gates."""
SPECIAL = ("<pad>", "<bos>", "<eos>")
VOCABULARY = len(SPECIAL) + 256
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{{ c.get('text', '') }}{% endfor %}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def redraw(module: M, *, std: float = 0.1, modulation: float = 1.0) -> M:
    """Make random blocks do real work, on outputs that change from step to step about as much as a trained model's.

    Every constant parameter (zero-initialised outputs, gates, norm scales) gets random values around its constant,
    `std` wide: zero gates turn blocks into identities and would make any reuse exact. PyTorch's default
    initialisation shrinks the variance of a linear layer's input to a third, which the factor sqrt(3) undoes; layers
    that see the timestep get the factor `modulation` instead, since sqrt(3) there makes neighbouring steps unrelated.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.numel() > 1 and parameter.min() == parameter.max():
                parameter.add_(torch.randn_like(parameter), alpha=std)
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(modulation if any(part in name for part in TIMESTEP_PARTS) else 3**0.5)
    return module.eval()


def byte_tokenizer(length: int = 32, *, bos: bool = True, padding_side: str = "right") -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, an end token, and a start token with `bos`; `length` is `model_max_length`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>" if bos else "$A <eos>",
        special_tokens=[(token, vocabulary[token]) for token in SPECIAL],
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<pad>",
        model_max_length=length,
        padding_side=padding_side,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def clip_config(length: int = 32) -> CLIPTextConfig:
    """A two-layer CLIP text tower that pools at the tokenizer's end token."""
    return CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=length,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def clip(length: int = 32) -> CLIPTextModel:
    return CLIPTextModel(clip_config(length)).eval()


def clip_with_projection() -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(clip_config()).eval()


def t5_sizes(width: int) -> dict[str, int]:
    return {
        "vocab_size": VOCABULARY,
        "d_model": width,
        "d_kv": 8,
        "d_ff": 2 * width,
        "num_layers": 2,
        "num_heads": 2,
        "pad_token_id": 0,
        "eos_token_id": 2,
    }


def t5(width: int = TEXT_WIDTH) -> T5EncoderModel:
    return T5EncoderModel(T5Config(**t5_sizes(width))).eval()


def umt5() -> UMT5EncoderModel:
    return UMT5EncoderModel(UMT5Config(**t5_sizes(TEXT_WIDTH))).eval()


def language_model(config: type[PretrainedConfig]) -> PreTrainedModel:
    """The bare decoder of a language model family (Llama, Qwen, Gemma, Mistral), four layers deep."""
    return AutoModel.from_config(
        config(
            vocab_size=VOCABULARY,
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).eval()


def image_vae(
    latent_channels: int = 4, *, scaling_factor: float = 0.5, shift_factor: float | None = None
) -> AutoencoderKL:
    """An image autoencoder that halves each side."""
    return AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=4,
        mid_block_add_attention=False,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
    ).eval()


def picture(height: int, width: int) -> torch.Tensor:
    """A smooth RGB picture in 0..1, shape (1, 3, height, width)."""
    rows = torch.linspace(0, 1, height)[:, None].expand(height, width)
    columns = torch.linspace(0, 1, width)[None, :].expand(height, width)
    return torch.stack([rows, columns, 1 - rows * columns])[None]
