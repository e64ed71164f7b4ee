"""The picture of the demo: one row a method, one column a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw, ImageFont

from cachekit.demo.runner import Result
from cachekit.demo.table import computed_text
from cachekit.metrics import summarise

_CELL, _LABEL, _HEADER, _GAP, _LINE = 128, 168, 34, 6, 14
_PER_LINE, _LINES = 20, 2

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def draw_grid(results: Sequence[Result]) -> Image.Image:
    """A labelled grid. Pictures smaller than a cell are enlarged by a whole factor, so that pixels stay pixels."""
    samples = results[0].samples
    size = max(_CELL, *(max(sample.image.shape[1:]) for sample in samples))
    width = _LABEL + len(samples) * (size + _GAP)
    height = _HEADER + len(results) * (size + _GAP)
    sheet = Image.new("RGB", (width, height), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for column, sample in enumerate(samples):
        _write(pen, font, (_LABEL + column * (size + _GAP), 4), _wrap(sample.prompt))
    for row, result in enumerate(results):
        top = _HEADER + row * (size + _GAP)
        _write(pen, font, (6, top + 4), _label(result, results[0]))
        for column, sample in enumerate(result.samples):
            picture = _enlarged(to_picture(sample.image), size)
            sheet.paste(picture, (_LABEL + column * (size + _GAP), top))
    return sheet


def to_picture(image: torch.Tensor) -> Image.Image:
    """A Pillow picture of a (3, H, W) image with floats in [0, 1]."""
    pixels = (image * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
    return Image.fromarray(pixels.numpy())


def _enlarged(picture: Image.Image, size: int) -> Image.Image:
    factor = max(1, size // max(picture.size))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def _label(result: Result, reference: Result) -> list[str]:
    lines = [result.method.name, *([result.method.settings] if result.method.settings else [])]
    lines += [f"computed {line}" for line in computed_text(result).splitlines()]
    lines.append(f"{result.seconds:.2f} s, {reference.seconds / result.seconds:.2f}x")
    if result is not reference:
        summary = summarise(sample.psnr for sample in result.samples)
        lines.append("equal" if summary.identical == summary.count else f"PSNR {summary.mean:.1f} dB")
    return lines


def _wrap(prompt: str) -> list[str]:
    """A prompt as a few short lines; what does not fit ends in dots."""
    text = " ".join(prompt.split())
    lines = [text[i : i + _PER_LINE] for i in range(0, len(text), _PER_LINE)]
    if len(lines) > _LINES:
        lines[_LINES - 1] = f"{lines[_LINES - 1][:-2]}..."
    return lines[:_LINES]


def _write(pen: ImageDraw.ImageDraw, font: Font, at: tuple[int, int], lines: Sequence[str]) -> None:
    for number, line in enumerate(lines):
        pen.text((at[0], at[1] + number * _LINE), line, fill="black", font=font)
