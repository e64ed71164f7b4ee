"""PSNR and SSIM on float images, and a summary that never hides identical pairs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Image", "Summary", "psnr", "ssim", "summarise"]

Image: TypeAlias = "torch.Tensor | npt.NDArray[np.floating]"
"""A tensor (C, H, W) or (B, C, H, W), or an array (H, W, C) or (B, H, W, C); floats in [0, 1]."""

_SSIM_WINDOW = 11


@dataclass(frozen=True)
class Summary:
    """What :func:`summarise` says about a list of values.

    Attributes:
        mean: mean of the finite values; infinite when all pairs were identical.
        worst: smallest value.
        identical: number of identical pairs (infinite values), which the mean leaves out.
        count: number of all values.
    """

    mean: float
    worst: float
    identical: int
    count: int


def psnr(a: Image, b: Image) -> float:
    """Peak signal-to-noise ratio in dB: 10 log10(1 / MSE), the MSE taken over all pixels of all images of a batch.

    Returns:
        Decibels; `math.inf` for identical images.

    Raises:
        ValueError: the shapes differ, or an image is not made of floats in [0, 1].
    """
    from torchmetrics.functional.image import peak_signal_noise_ratio

    first, second = _pair(a, b)
    return float(peak_signal_noise_ratio(first, second, data_range=1.0))


def ssim(a: Image, b: Image) -> float:
    """Structural similarity (Wang et al., 2004; Gaussian window of 11 pixels, sigma 1.5), the mean over a batch.

    Returns:
        At most 1, which identical images reach.

    Raises:
        ValueError: as :func:`psnr`, or an image is smaller than the window.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure

    first, second = _pair(a, b)
    height, width = first.shape[-2:]
    if min(height, width) < _SSIM_WINDOW:
        raise ValueError(f"SSIM needs images of at least {_SSIM_WINDOW}x{_SSIM_WINDOW} pixels, got {height}x{width}")
    return float(structural_similarity_index_measure(first, second, data_range=1.0))


def summarise(values: Iterable[float]) -> Summary:
    """Mean over the finite values beside the number of infinite ones (identical pairs).

    Raises:
        ValueError: there is no value, or one is NaN or negative infinity.
    """
    numbers = [float(value) for value in values]
    if not numbers:
        raise ValueError("there is nothing to summarise")
    if any(math.isnan(number) or number == -math.inf for number in numbers):
        raise ValueError("a value is NaN or negative infinity")
    finite = [number for number in numbers if math.isfinite(number)]
    mean = math.fsum(finite) / len(finite) if finite else math.inf
    return Summary(mean, min(numbers), len(numbers) - len(finite), len(numbers))


def _pair(a: Image, b: Image) -> tuple[torch.Tensor, torch.Tensor]:
    """Both images as float64 (B, C, H, W) on the CPU."""
    first, second = _images(a, "first"), _images(b, "second")
    if first.shape != second.shape:
        raise ValueError(f"the images have different shapes: {tuple(first.shape)}, {tuple(second.shape)} (B, C, H, W)")
    return first, second


def _images(image: Image, which: str) -> torch.Tensor:
    if isinstance(image, np.ndarray):
        if not np.issubdtype(image.dtype, np.floating):
            raise ValueError(f"the {which} image holds {image.dtype}, expected floats in [0, 1]")
        tensor = torch.from_numpy(image.astype(np.float64)).movedim(-1, max(image.ndim - 3, 0))
    elif isinstance(image, torch.Tensor):
        if not image.is_floating_point():
            raise ValueError(f"the {which} image holds {image.dtype}, expected floats in [0, 1]")
        tensor = image.detach().to(device="cpu", dtype=torch.float64)
    else:
        raise ValueError(f"the {which} image is a {type(image).__name__}, expected a torch tensor or a NumPy array")
    if tensor.ndim not in (3, 4) or not tensor.numel():
        raise ValueError(f"the {which} image has shape {tuple(image.shape)}, expected 3 or 4 non-empty dimensions")
    if torch.isnan(tensor).any():
        raise ValueError(f"the {which} image holds NaN")
    low, high = float(tensor.min()), float(tensor.max())
    if low < 0.0 or high > 1.0:
        raise ValueError(f"the {which} image holds values from {low:.4g} to {high:.4g}, expected [0, 1]")
    return tensor if tensor.ndim == 4 else tensor.unsqueeze(0)
