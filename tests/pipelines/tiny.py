"""Every tiny pipeline of the end-to-end tests, in one list."""

from __future__ import annotations

from .base import TinyPipeline
from .families import (
    aura_flow,
    cogvideox,
    flux,
    flux2,
    hunyuan_video,
    latte,
    ltx,
    lumina2,
    mochi,
    pixart,
    qwen_image,
    sana,
    sd3,
    unet,
    wan,
    z_image,
)

FAMILIES = (
    aura_flow,
    cogvideox,
    flux,
    flux2,
    hunyuan_video,
    latte,
    ltx,
    lumina2,
    mochi,
    pixart,
    qwen_image,
    sana,
    sd3,
    unet,
    wan,
    z_image,
)

__all__ = ["TinyPipeline", "pipelines"]


def pipelines() -> list[TinyPipeline]:
    """All families, in a fixed order."""
    return [tiny for module in FAMILIES for tiny in module.family()]
