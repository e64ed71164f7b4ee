"""The data of the embedded pipelines: which emoji, under which prompt, and how a picture of one is drawn.

The selection is a list of code-point ranges, so that nobody picked glyphs by how well they train. Pictures are drawn
from the colour bitmaps of Noto Color Emoji (SIL Open Font License 1.1) and need Pillow, imported when first drawn.
"""

from __future__ import annotations

import random
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
"""Where the Debian package ``fonts-noto-color-emoji`` puts the font."""

BITMAP_SIZE = 109
"""The only size (pixels per em) for which the font carries bitmaps."""

PICTURE_SIZE = 64
"""Height and width of a training picture in pixels."""

RANGES: tuple[tuple[int, int], ...] = (
    (0x2764, 0x2764),  # red heart
    (0x1F32D, 0x1F37F),  # food, plants, drinks
    (0x1F380, 0x1F384),  # ribbon to Christmas tree
    (0x1F3B7, 0x1F3BB),  # musical instruments
    (0x1F400, 0x1F43D),  # animals, then animal faces
    (0x1F451, 0x1F462),  # clothes
    (0x1F499, 0x1F49C),  # blue, green, yellow, purple heart
    (0x1F5A4, 0x1F5A4),  # black heart
    (0x1F680, 0x1F683),  # rocket to railway car
    (0x1F980, 0x1F98F),  # more animals
    (0x1F9E1, 0x1F9E1),  # orange heart
)
"""Inclusive code-point ranges: the whole rule."""

ALIASES: dict[int, str] = {
    0x2764: "red heart",
    0x1F33D: "ear of corn",
    0x1F346: "eggplant",
    0x1F41E: "ladybug",
    0x1F981: "lion",
    0x1F984: "unicorn",
    0x1F98A: "fox",
}
"""Common names (as in Unicode CLDR) that replace formal ones nobody would type."""


def codepoints() -> list[int]:
    """Return the code points that the rule selects, in ascending order."""
    return [point for first, last in RANGES for point in range(first, last + 1)]


def prompt_of(point: int) -> str:
    """Return the prompt of a code point: its common name if it has one, else its Unicode name in lower case."""
    return ALIASES.get(point) or unicodedata.name(chr(point)).lower()


def prompts() -> list[str]:
    """Return one prompt per selected glyph, in the order of :func:`codepoints`."""
    return [prompt_of(point) for point in codepoints()]


@dataclass(frozen=True)
class View:
    """How one picture of a glyph is placed and coloured.

    Attributes:
        size: Longer side of the glyph in pixels.
        dx: Shift to the right from the centre, in pixels.
        dy: Shift downwards from the centre, in pixels.
        hue: Rotation of the hue in 1/256 of the colour circle.
    """

    size: int = 58
    dx: int = 0
    dy: int = 0
    hue: int = 0


SIZES = range(56, 61)
SHIFTS = range(-1, 2)
HUES = range(-5, 6)


def random_view(rng: random.Random) -> View:
    """Draw one mild augmentation: size 56 to 60 of 64 pixels, shift up to 1 pixel, hue up to 7 degrees."""
    return View(rng.choice(SIZES), rng.choice(SHIFTS), rng.choice(SHIFTS), rng.choice(HUES))


@lru_cache(maxsize=2048)
def glyph(point: int, font: Path = FONT) -> Image:
    """Return the native colour bitmap of a code point over white, cut to its ink and padded to a square (RGB)."""
    from PIL import Image, ImageDraw, ImageFont

    canvas = Image.new("RGBA", (192, 192), (255, 255, 255, 0))
    face = ImageFont.truetype(str(font), BITMAP_SIZE)
    ImageDraw.Draw(canvas).text((16, 16), chr(point), font=face, embedded_color=True)
    box = canvas.getchannel("A").getbbox()
    if box is None:
        raise ValueError(f"{font} has no colour bitmap for U+{point:04X}; install fonts-noto-color-emoji")
    ink = canvas.crop(box)
    side = max(ink.size)
    square = Image.new("RGBA", (side, side), (255, 255, 255, 255))
    square.alpha_composite(ink, ((side - ink.width) // 2, (side - ink.height) // 2))
    return square.convert("RGB")


def draw(point: int, view: View | None = None, font: Path = FONT) -> Image:
    """Draw one training picture (RGB, ``PICTURE_SIZE`` pixels square, white background)."""
    from PIL import Image

    view = view or View()
    ink = glyph(point, font).resize((view.size, view.size), Image.Resampling.LANCZOS)
    if view.hue:
        hue, saturation, value = ink.convert("HSV").split()
        turned = hue.point([(level + view.hue) % 256 for level in range(256)])
        ink = Image.merge("HSV", (turned, saturation, value)).convert("RGB")
    picture = Image.new("RGB", (PICTURE_SIZE, PICTURE_SIZE), "white")
    margin = (PICTURE_SIZE - view.size) // 2
    picture.paste(ink, (margin + view.dx, margin + view.dy))
    return picture
