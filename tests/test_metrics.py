"""Metrics with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cachekit.metrics import psnr, ssim, summarise


@pytest.fixture
def picture() -> torch.Tensor:
    return torch.rand(3, 24, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("error", [1.0, 0.5, 0.1, 0.01, 1e-4])
def test_uniform_error_has_a_closed_form(error: float) -> None:
    black = torch.zeros(3, 16, 16)
    assert psnr(black, black + error) == pytest.approx(20 * math.log10(1 / error), abs=1e-4)


def test_psnr_does_not_saturate_below_28_db() -> None:
    black = torch.zeros(3, 16, 16)
    values = [psnr(black, black + error) for error in (0.04, 0.1, 0.3, 0.9)]
    assert values == sorted(values, reverse=True)
    assert values[-1] < 1.0


def test_batch_pools_the_squared_error() -> None:
    black = torch.zeros(2, 3, 16, 16)
    half = black.clone()
    half[1] = 0.1
    assert psnr(black, half) == pytest.approx(10 * math.log10(1 / 0.005), abs=1e-4)


def test_identical_images(picture: torch.Tensor) -> None:
    assert psnr(picture, picture.clone()) == math.inf
    assert ssim(picture, picture.clone()) == pytest.approx(1.0, abs=1e-9)


def test_ssim_of_constant_images_has_a_closed_form() -> None:
    a, b = 0.2, 0.6
    luminance = (2 * a * b + 0.01**2) / (a * a + b * b + 0.01**2)
    assert ssim(torch.full((3, 16, 16), a), torch.full((3, 16, 16), b)) == pytest.approx(luminance, abs=1e-6)


def test_ssim_falls_with_noise_and_is_symmetric(picture: torch.Tensor) -> None:
    noise = torch.rand(picture.shape, generator=torch.Generator().manual_seed(1))
    little, much = picture.lerp(noise, 0.1), picture.lerp(noise, 0.9)
    assert 1.0 > ssim(picture, little) > ssim(picture, much)
    assert ssim(picture, much) == pytest.approx(ssim(much, picture), abs=1e-9)


@pytest.mark.parametrize("metric", [psnr, ssim])
def test_layouts_agree(metric: object, picture: torch.Tensor) -> None:
    assert callable(metric)
    other = (picture * 0.9).clamp(0, 1)
    rows = [image.permute(1, 2, 0).numpy() for image in (picture, other)]
    expected = metric(picture, other)
    assert metric(picture[None], other[None]) == pytest.approx(expected)
    assert metric(*rows) == pytest.approx(expected)
    assert metric(*(row[None] for row in rows)) == pytest.approx(expected)
    assert metric(picture, rows[1]) == pytest.approx(expected)


def test_half_precision_is_compared_in_full(picture: torch.Tensor) -> None:
    half = picture.half()
    assert psnr(half, half.float()) == math.inf


def spoilt(value: float) -> torch.Tensor:
    image = torch.zeros(3, 16, 16)
    image[0, 0, 0] = value
    return image


@pytest.mark.parametrize("metric", [psnr, ssim])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(3, 16, 17), "different shapes"),
        (torch.zeros(2, 3, 16, 16), "different shapes"),
        (torch.zeros(3, 16, 16, dtype=torch.uint8), "expected floats"),
        (np.zeros((16, 16, 3), dtype=np.uint8), "expected floats"),
        (spoilt(math.nan), "NaN"),
        (spoilt(math.inf), "expected \\[0, 1\\]"),
        (spoilt(1.01), "expected \\[0, 1\\]"),
        (spoilt(-0.01), "expected \\[0, 1\\]"),
        (torch.zeros(16, 16), "dimensions"),
        (np.zeros(16), "dimensions"),
        (torch.zeros(3, 0, 16), "dimensions"),
        ([[0.0]], "list"),
    ],
)
def test_bad_images_are_refused(metric: object, bad: object, message: str) -> None:
    assert callable(metric)
    good = torch.zeros(3, 16, 16)
    with pytest.raises(ValueError, match=message):
        metric(good, bad)
    with pytest.raises(ValueError, match=message):
        metric(bad, good)


def test_ssim_needs_room_for_its_window() -> None:
    with pytest.raises(ValueError, match="11x11"):
        ssim(torch.zeros(3, 10, 64), torch.zeros(3, 10, 64))


def test_summary_counts_identical_pairs_instead_of_averaging_them() -> None:
    summary = summarise([20.0, math.inf, 40.0])
    assert (summary.mean, summary.worst, summary.identical, summary.count) == (30.0, 20.0, 1, 3)


def test_summary_of_identical_pairs_only() -> None:
    summary = summarise([math.inf, math.inf])
    assert (summary.mean, summary.worst, summary.identical, summary.count) == (math.inf, math.inf, 2, 2)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [-math.inf]])
def test_summary_refuses_what_it_cannot_summarise(values: list[float]) -> None:
    with pytest.raises(ValueError, match=r"nothing|NaN"):
        summarise(values)
