"""The arithmetic of `benchmarks.text_kv`; no test asserts a time."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks import text_kv

TINY = text_kv.Size(heads=1, layers=1, text_tokens=8, side=2, steps=4, rounds=1)


def test_the_work_saved_is_that_of_the_text() -> None:
    figures = {item.name: item for item in text_kv.measure(TINY)}
    width = text_kv.HEAD_DIM
    caption = 2 * 8 * (text_kv.TEXT_WIDTH * width + width * width)
    keys_and_values = 2 * 2 * 8 * width * width
    reused = 2 * (TINY.steps - 1)
    assert figures["projections reused in it"].value == 4 * reused
    assert figures["work saved in it"].value == pytest.approx(reused * (caption + keys_and_values) / 1e9)
    assert figures["held for both branches"].value == pytest.approx(
        2 * 8 * (3 * width + text_kv.TEXT_WIDTH) * 4 / 2**20
    )
    assert figures["outputs that differ by a bit"].passes
    total = text_kv.flops(partial(text_kv.sample, text_kv.model(TINY), TINY))
    assert figures["work ratio of a later run"].value == pytest.approx(
        total / (total - reused * (caption + keys_and_values))
    )
