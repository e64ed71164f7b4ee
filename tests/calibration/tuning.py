"""Made-up measurements, and the tiny pipelines that tuning is tested on."""

from __future__ import annotations

from typing import Any

from cachekit.calibration.measure import Measured, Picture, Setting
from tests.pipelines.tiny import TINY

PROMPTS = ["a cat", "a dog", "a fox", "a hen"]
CALLS = 40


def measured(
    value: float,
    speedup: float,
    psnr: float | tuple[float, ...],
    name: str = "first_block",
    time: float | None = None,
    calls: int = CALLS,
) -> Measured:
    """A setting with this speed-up by work and these pictures."""
    computed = calls / speedup
    pictures = psnr if isinstance(psnr, tuple) else (psnr, psnr)
    config: Any = None if name == "fewer steps" else object()
    drawn = tuple(
        Picture(item, 1.0, speedup if time is None else time, calls, computed)  # type: ignore[arg-type]
        for item in pictures
    )
    return Measured(Setting(name, value, f"x={value:g}", 20, config), drawn, calls, 0.0)


def tiny_flux() -> tuple[Any, dict[str, Any]]:
    """A tiny Flux pipeline, and what it is called with."""
    tiny = TINY["flux"]
    return tiny.build(), {**tiny.sizes[0], **tiny.common, **tiny.guided, "negative_prompt": ""}
