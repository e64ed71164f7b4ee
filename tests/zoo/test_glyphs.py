"""The training prompts follow from the code-point rule alone."""

from __future__ import annotations

import random
import subprocess
import sys
import unicodedata

import pytest

from cachekit import zoo
from cachekit.zoo import glyphs

needs_font = pytest.mark.skipif(not glyphs.FONT.exists(), reason="needs the package fonts-noto-color-emoji")


def test_there_are_at_least_192_different_prompts() -> None:
    prompts = zoo.prompts("emoji-flux")
    assert len(prompts) == len(set(prompts)) >= 192
    assert "red heart" in prompts


def test_each_prompt_is_the_unicode_name_or_a_listed_alias() -> None:
    points = glyphs.codepoints()
    assert points == sorted(set(points))
    for point, prompt in zip(points, zoo.prompts("emoji-flux"), strict=True):
        assert any(first <= point <= last for first, last in glyphs.RANGES)
        assert prompt == glyphs.ALIASES.get(point, unicodedata.name(chr(point)).lower())


def test_every_alias_belongs_to_a_selected_glyph() -> None:
    assert set(glyphs.ALIASES) <= set(glyphs.codepoints())


def test_views_are_seeded_and_stay_inside_the_picture() -> None:
    views = [glyphs.random_view(random.Random(7)) for _ in range(2)]
    assert views[0] == views[1]
    rng = random.Random(0)
    for view in (glyphs.random_view(rng) for _ in range(500)):
        margin = (glyphs.PICTURE_SIZE - view.size) // 2
        assert max(abs(view.dx), abs(view.dy)) <= margin


def test_using_the_zoo_does_not_import_its_trainer() -> None:
    code = (
        "import sys; from cachekit import zoo; zoo.prompts('emoji-flux'); "
        "assert not [name for name in sys.modules if name.startswith('cachekit.zoo.train')], 'trainer imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_font
def test_a_view_moves_and_recolours_the_drawing() -> None:
    heart = 0x2764
    plain = glyphs.draw(heart)
    assert plain.size == (64, 64)
    assert plain.getpixel((0, 0)) == (255, 255, 255)
    red, green, blue = plain.getpixel((32, 28))
    assert red > 150 > max(green, blue)
    assert glyphs.draw(heart, glyphs.View(dx=2)).tobytes() != plain.tobytes()
    assert glyphs.draw(heart, glyphs.View(hue=5)).tobytes() != plain.tobytes()


@needs_font
def test_an_undrawable_code_point_is_refused() -> None:
    with pytest.raises(ValueError, match=r"U\+0020"):
        glyphs.draw(0x20)
