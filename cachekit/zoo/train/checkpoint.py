"""Training state on disk, written whole or not at all; only the trainer reads it, nothing of it is shipped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **state: Any) -> None:
    """Write weights, optimiser, random state and ``state``; a crash leaves the previous file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(), **state}, part
    )
    os.replace(part, path)


def restore(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load a checkpoint into model, optimiser and the random state; return the rest, empty when there is none."""
    if not path.exists():
        return {}
    stored: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(stored.pop("model"))
    optimizer.load_state_dict(stored.pop("optimizer"))
    torch.set_rng_state(stored.pop("rng"))
    return stored
