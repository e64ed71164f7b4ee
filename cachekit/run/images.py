"""PNG files that say how they were drawn."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

SETTINGS, WORK = "cachekit", "cachekit-work"
"""Names of the two texts in a file: what decides the picture, and what drawing it took."""

_END = b"\0\0\0\0IEND\xaeB`\x82"


def encode(image: Any, settings: dict[str, Any], work: dict[str, Any]) -> bytes:
    """A PIL image as PNG with its settings, and what it took, as JSON inside."""
    from PIL.PngImagePlugin import PngInfo

    texts = PngInfo()
    for name, value in ((SETTINGS, settings), (WORK, work)):
        texts.add_text(name, json.dumps(value, sort_keys=True))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", pnginfo=texts)
    return buffer.getvalue()


def decode(path: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Settings and work of a file; None when there is none, or it was not written by :func:`encode`, or is damaged."""
    from PIL import Image

    try:
        data = path.read_bytes()
        if not data.endswith(_END):  # PIL accepts a file whose end was cut off
            return None
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            image.load()
            texts = dict(getattr(image, "text", {}))
        settings, work = (json.loads(texts[name]) for name in (SETTINGS, WORK))
    except (OSError, SyntaxError, ValueError, KeyError):
        return None
    return (settings, work) if isinstance(settings, dict) and isinstance(work, dict) else None
