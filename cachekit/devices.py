"""Names of devices, and what torch sees of them; which one a run takes is decided by `offload.devices`."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

ACCEPTED = "cpu, auto, cuda, cuda:N, mps, mps:N"
"""What may stand where a device is asked for, in any case."""


@dataclass(frozen=True)
class Seen:
    """What torch sees.

    Attributes:
        cards: number of CUDA devices, AMD's (ROCm) included.
        rocm: they are AMD's.
        mps: there is an Apple GPU.
        xpu: there is an Intel GPU, which cannot be selected.
    """

    cards: int = 0
    rocm: bool = False
    mps: bool = False
    xpu: bool = False


def seen() -> Seen:
    """What torch sees now."""
    return Seen(
        cards=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        rocm=getattr(torch.version, "hip", None) is not None,
        mps=torch.backends.mps.is_available(),
        xpu=hasattr(torch, "xpu") and torch.xpu.is_available(),
    )


def device_name(value: object) -> str | None:
    """The usual spelling of what a user gave for a device: "auto", "cpu", "cuda", "cuda:N", "mps" or "xpu".

    "mps:N" is "mps". Intel's "xpu" and "xpu:N" are understood, so that they can be answered; they cannot be selected.

    Args:
        value: a text in any case, or a `torch.device`; None and "" stand for nothing asked.

    Raises:
        ValueError: it is none of the accepted names; the message lists them.
    """
    if value is None:
        return None
    text = str(value).strip().lower() if isinstance(value, (str, torch.device)) else None
    if text == "":
        return None
    if text in ("auto", "cpu", "cuda"):
        return text
    number = re.fullmatch(r"(cuda|mps|xpu)(?::([0-9]+))?", text or "")
    if number is None:
        raise ValueError(f"unknown device {str(value)!r}; accepted: {ACCEPTED}")
    kind, index = number.groups()
    return f"cuda:{int(index)}" if kind == "cuda" else kind
