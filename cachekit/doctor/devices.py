"""The devices that torch sees, a line each."""

from __future__ import annotations

import os

import psutil
import torch


def seen_by_torch() -> list[str]:
    """Kind, name and memory of each device."""
    lines = [f"cpu: {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.1f} GiB"]
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        lines.append(f"cuda:{number}: {card.name}, {card.total_memory / 2**30:.1f} GiB")
    if torch.backends.mps.is_available():
        lines.append("mps")
    return lines
