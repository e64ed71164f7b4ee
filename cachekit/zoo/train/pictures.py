"""A pool of augmented pictures as one tensor, drawn once and kept as bytes."""

from __future__ import annotations

import random

import torch
from tqdm import tqdm

from cachekit.zoo import glyphs


def pool(per_glyph: int, seed: int) -> torch.Tensor:
    """Draw ``per_glyph`` random views of every selected glyph.

    Returns:
        A uint8 tensor of shape (glyphs, per_glyph, 3, 64, 64).
    """
    rng = random.Random(seed)
    views = [
        [to_bytes(point, glyphs.random_view(rng)) for _ in range(per_glyph)]
        for point in tqdm(glyphs.codepoints(), desc="drawing", unit="glyph")
    ]
    return torch.stack([torch.stack(row) for row in views])


def to_bytes(point: int, view: glyphs.View | None = None) -> torch.Tensor:
    """Draw one picture as a uint8 tensor of shape (3, 64, 64)."""
    raw = bytearray(glyphs.draw(point, view).tobytes())
    size = glyphs.PICTURE_SIZE
    return torch.frombuffer(raw, dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1).contiguous()


def to_unit(pictures: torch.Tensor) -> torch.Tensor:
    """Map uint8 pictures to float32 in [-1, 1], the range an AutoencoderKL works in."""
    return pictures.float().div(127.5).sub(1.0)
