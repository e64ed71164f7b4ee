"""How pipelines are called."""

from __future__ import annotations

from typing import Any

import pytest

from cachekit.run import Picture, RunError, Settings
from cachekit.run.painter import Painter, _call_arguments

from ..pipelines.tiny import TINY

FOX = Picture("fox", 0, {})


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("flux", {"guidance_scale": 4.0}),
        ("qwen-image", {"true_cfg_scale": 4.0, "negative_prompt": ""}),
        ("sd15", {"guidance_scale": 4.0}),
        ("sd3", {"guidance_scale": 4.0}),
    ],
)
def test_guidance_has_the_name_that_has_an_effect(family: str, expected: dict[str, Any]) -> None:
    found = _call_arguments(TINY[family].build(), Settings("", 4, guidance=4.0))
    assert {
        name: found[name] for name in found if "guidance" in name or "cfg" in name or "negative" in name
    } == expected


def test_arguments_win_over_what_follows_from_guidance() -> None:
    settings = Settings("", 4, guidance=4.0, arguments={"negative_prompt": "blurry"})
    assert _call_arguments(TINY["qwen-image"].build(), settings)["negative_prompt"] == "blurry"
    assert "true_cfg_scale" not in _call_arguments(TINY["qwen-image"].build(), Settings("", 4))


def test_a_pipeline_that_gives_no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = TINY["wan"].build()
    monkeypatch.setattr("cachekit.run.painter.load", lambda name, device: pipe)
    size = {**TINY["wan"].sizes[0], "max_sequence_length": 8}
    with pytest.raises(RunError, match="WanPipeline gives no images"):
        Painter(Settings("", 2, arguments=size), "cpu").paint(FOX)
