"""The Python blocks of the README and of every page under docs/ run as they stand."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

import cachekit
from cachekit import TransformerBlockRegistry

ROOT = Path(__file__).parent.parent
LEAVES = {"README.md": ["ratios.safetensors"]}
"""Files that the blocks of a page write."""


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


WITH_CODE = {str(page.relative_to(ROOT)): page for page in pages() if blocks(page)}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CODE)
def test_the_python_blocks_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks of a page run one after the other; a warning of ours fails the page."""
    monkeypatch.chdir(tmp_path)
    known = dict(TransformerBlockRegistry._entries)
    names: dict[str, object] = {"__name__": "page"}
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("error", cachekit.CacheWarning)
            for block in blocks(WITH_CODE[name]):
                exec(compile(block, name, "exec"), names)
    finally:
        TransformerBlockRegistry._entries.clear()
        TransformerBlockRegistry._entries.update(known)
    assert all((tmp_path / file).is_file() for file in LEAVES.get(name, ()))
    assert capsys.readouterr().out or "print(" not in "".join(blocks(WITH_CODE[name]))


def test_pages_are_found() -> None:
    assert {"README.md", "docs/own-models.md", "docs/caches/first_block.md"} <= set(WITH_CODE)
    assert len(blocks(ROOT / "README.md")) >= 3
