"""Retrieval tells right from wrong, and the shipped pipeline passes it."""

from __future__ import annotations

import pytest
import torch

from cachekit import zoo
from cachekit.zoo import evaluate, glyphs

pytestmark = pytest.mark.skipif(not glyphs.FONT.exists(), reason="needs the package fonts-noto-color-emoji")

POINTS = {"red heart": 0x2764, "blue heart": 0x1F499, "banana": 0x1F34C, "penguin": 0x1F427}


@pytest.mark.slow
def test_training_views_are_retrieved_and_swapped_ones_are_not() -> None:
    views = [glyphs.View(54, 2, -1), glyphs.View(58, -2, 2), glyphs.View(60, 0, 1), glyphs.View(56, 1, 1)]
    pictures = [glyphs.draw(point, view) for point, view in zip(POINTS.values(), views, strict=True)]
    right = evaluate.retrieval(pictures, list(POINTS))
    assert right.accuracy == 1.0
    assert right.misses == []
    assert right.psnr > 60
    assert right.chance == pytest.approx(1 / len(glyphs.codepoints()))
    wrong = evaluate.retrieval(pictures[:2], ["penguin", "blue heart"])
    assert wrong.accuracy == 0.5
    assert wrong.misses == [("penguin", "red heart")]


def test_shifting_matches_drawing_at_a_shift() -> None:
    centred = evaluate.pixels(glyphs.draw(0x1F34C, glyphs.View(size=56)))
    there = evaluate.pixels(glyphs.draw(0x1F34C, glyphs.View(size=56, dx=-2, dy=1)))
    assert torch.equal(evaluate.shifted(centred, -2, 1), there)


@pytest.mark.slow
def test_the_shipped_pipeline_draws_what_the_prompt_says() -> None:
    prompts = ["red heart", "banana", "penguin", "rocket", "crown"]
    pictures = evaluate.draw(zoo.load("emoji-flux"), prompts, batch=5)
    result = evaluate.retrieval(pictures, prompts)
    assert result.misses == []
    assert result.glyphs >= 192
