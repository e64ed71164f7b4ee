"""The embedded weights are those that were recorded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cachekit import zoo
from cachekit.zoo import checksums, pipelines


@pytest.mark.parametrize("name", zoo.names())
def test_the_embedded_weights_are_those_that_were_recorded(name: str) -> None:
    """If this fails after a training: python -m cachekit.zoo.checksums"""
    assert checksums.damage(name) == []
    assert len(checksums.recorded()[name]) >= 3


def test_damage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = pipelines.entry("emoji-flux")
    folder = tmp_path / "copy"
    shutil.copytree(original.folder, folder)
    monkeypatch.setitem(pipelines.ZOO, "emoji-flux", pipelines.Entry(folder, original.prompts))
    with (folder / "vae" / "diffusion_pytorch_model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        byte = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([byte[0] ^ 1]))
    (folder / "text_encoder" / "model.safetensors").unlink()
    (folder / "more.safetensors").touch()
    assert checksums.damage("emoji-flux") == [
        "text_encoder/model.safetensors is missing",
        "more.safetensors is not recorded",
        "vae/diffusion_pytorch_model.safetensors has changed",
    ]


def test_what_is_recorded_can_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = checksums.RECORD.read_bytes()
    monkeypatch.setattr(checksums, "RECORD", tmp_path / "checksums.json")
    (tmp_path / "checksums.json").write_text("{}", encoding="utf-8")
    assert checksums.damage("emoji-flux") == ["no checksums are recorded for emoji-flux"]
    checksums.record()
    assert (tmp_path / "checksums.json").read_bytes() == shipped
