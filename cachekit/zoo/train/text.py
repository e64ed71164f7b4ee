"""Small CLIP and T5 text encoders with random, frozen weights, and tokenizers built from the training prompts.

Nothing is trained here: the transformer only needs that different prompts look different and that equal words look
alike. Known words are one token each, unknown ones fall apart into bytes (CLIP) or characters (T5).
"""

from __future__ import annotations

import json
import string
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel

from cachekit.zoo.tokenizers import ShortT5Tokenizer

CLIP_LENGTH = 24
T5_LENGTH = 10
"""Tokens a prompt: the longest training prompt has 6 (with the end token), an unknown word takes one a letter."""

START, END = "<|startoftext|>", "<|endoftext|>"


def clip_tokenizer(prompts: list[str]) -> CLIPTokenizer:
    """Build a byte-level BPE whose merges join every word of the prompts."""
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(False)])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=4000, min_frequency=0, initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False
    )
    bpe.train_from_iterator(prompts, trainer)
    known = sorted(bpe.get_vocab(), key=bpe.get_vocab().__getitem__)
    letters = [*alphabet, *(letter + "</w>" for letter in alphabet)]
    pieces = [*dict.fromkeys([*letters, *known]), START, END]
    merges = [tuple(merge) for merge in merges_of(bpe)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=CLIP_LENGTH)


def merges_of(bpe: Tokenizer) -> list[list[str]]:
    """Return the merges of a trained BPE, in order, as pairs."""
    merges = json.loads(bpe.to_str())["model"]["merges"]
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]


def t5_tokenizer(prompts: list[str]) -> ShortT5Tokenizer:
    """Build a unigram model in which a whole word always beats its letters."""
    words = sorted({word for prompt in prompts for word in prompt.split()})
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [("▁" + word, -1.0) for word in words]
    pieces += [(letter, -10.0) for letter in string.ascii_lowercase + string.digits + "-'.,!?"]
    return ShortT5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=T5_LENGTH)


def clip_encoder(tokenizer: CLIPTokenizer, seed: int) -> CLIPTextModel:
    """Build the CLIP encoder; its pooled output (width 64) is what modulates every block."""
    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        projection_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CLIP_LENGTH,
        initializer_factor=4.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return frozen(CLIPTextModel(config))


def t5_encoder(tokenizer: ShortT5Tokenizer, seed: int) -> T5EncoderModel:
    """Build the T5 encoder; its output (tokens, 128) is the text stream."""
    torch.manual_seed(seed + 1)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return frozen(T5EncoderModel(config))


def frozen(model: torch.nn.Module) -> torch.nn.Module:
    """Round to what float16 can hold (the format on disk) and stop gradients."""
    return model.half().float().eval().requires_grad_(False)


@dataclass(frozen=True)
class TextEncoders:
    """Both tokenizers with their encoders."""

    clip_tokenizer: CLIPTokenizer
    clip: CLIPTextModel
    t5_tokenizer: ShortT5Tokenizer
    t5: T5EncoderModel

    @torch.no_grad()
    def __call__(self, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the transformer gets: T5 states (prompts, 10, 128) and pooled CLIP states (prompts, 64)."""
        padding = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        words = self.t5(self.t5_tokenizer(prompts, max_length=T5_LENGTH, **padding).input_ids)[0]
        pooled = self.clip(self.clip_tokenizer(prompts, max_length=CLIP_LENGTH, **padding).input_ids).pooler_output
        return words, pooled


def build(prompts: list[str], seed: int) -> TextEncoders:
    """Build everything from the prompts and a seed."""
    clip, t5 = clip_tokenizer(prompts), t5_tokenizer(prompts)
    return TextEncoders(clip, clip_encoder(clip, seed), t5, t5_encoder(t5, seed))
