"""A fingerprint of weights: tells models apart without reading all of their bytes."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

_SAMPLES = 32


def fingerprint(module: nn.Module) -> str:
    """Hexadecimal digest over names, shapes, dtypes and up to 32 evenly spaced values of every weight.

    Training, merging an adapter or casting changes it; a deliberate change of few values between the samples does not.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        flat = tensor.detach().reshape(-1)
        if len(flat):
            chosen = torch.linspace(0, len(flat) - 1, min(_SAMPLES, len(flat)), dtype=torch.float64).long()
            values = flat[chosen.to(flat.device)].contiguous().cpu()
            digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]
