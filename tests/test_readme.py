"""The README's Python blocks run as they stand."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

import cachekit
from cachekit import TransformerBlockRegistry

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.slow
def test_the_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", cachekit.CacheWarning)
            for block in blocks:
                exec(compile(block, str(README), "exec"), names)
        assert (tmp_path / "ratios.safetensors").is_file()
    finally:
        TransformerBlockRegistry._entries.clear()
