"""Random weights under which every block of a tiny model does real work."""

from __future__ import annotations

import re
import zlib

import torch
from torch import nn

# Random weights on top of a sinusoidal embedding jump from one timestep to the next, trained ones do not: keep the
# part of the modulation that depends on the time small beside its constant part.
TIME_EMBEDDING = re.compile(r"time|distilled_guidance|cond_factory|conditioning_emb\.|\b(t_embed|t_block|mapper)")
TIME_GAIN = 0.4
TIME_BIAS = 0.6


def seed_of(*parts: object) -> int:
    """A stable seed from names and numbers."""
    return zlib.crc32("/".join(map(str, parts)).encode())


@torch.no_grad()
def redraw(model: nn.Module, seed: int, gain: float = 1.0) -> None:
    """Draw every parameter again from its shape alone.

    Default initialisation leaves gates and output projections at zero, which makes every block the identity and
    every reuse trivially exact; some parameters are not initialised at all. Here matrices and kernels get
    `gain / sqrt(fan_in)` (less in time embeddings), norm weights lie around 1, all other vectors
    (biases, gates) around 0.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2:
            fan_in = parameter[0].numel() if parameter.shape[0] > 1 else parameter.shape[-1]
            value = gain * noise / fan_in**0.5 * (TIME_GAIN if TIME_EMBEDDING.search(name) else 1)
        elif name.endswith("weight"):
            value = 1 + 0.1 * noise
        else:
            value = (TIME_BIAS if TIME_EMBEDDING.search(name) else 0.1) * noise
        parameter.copy_(value.to(parameter.dtype))
