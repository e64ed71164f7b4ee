"""The device on which offloaded weights compute."""

from __future__ import annotations

import torch

from offload.errors import OffloadError


def execution_device(device: str | torch.device) -> torch.device:
    """A device from what the user gave; "auto" is the accelerator where there is one.

    Raises:
        OffloadError: no such device.
    """
    if str(device) == "auto":
        found = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
        return _indexed(torch.device("cpu") if found is None else found)
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise OffloadError(f"the device {device!s} cannot be used here ({error}); pass device='auto'") from error
    return _indexed(chosen)


def _indexed(device: torch.device) -> torch.device:
    """With its number, as tensors name it."""
    return device if device.type == "cpu" else torch.empty(0, device=device).device
