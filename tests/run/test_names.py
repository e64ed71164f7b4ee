"""Contract 14: names from prompts never leave the output folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cachekit.run.names import file_name

DIGEST = "0123456789abcdef" * 4
HOSTILE = [
    "../../etc/passwd",
    "/etc/passwd",
    "..\\..\\windows\\system32",
    "C:\\con",
    "a\0b",
    "a\nb",
    ".",
    "..",
    "",
    " ",
    "~root",
    "$(rm -rf .)",
    "%2e%2e%2f",
    "\u2024\u2024\u2215x",
    "\uff0e\uff0e\uff0f",
    "red\u202egnp.exe",
    "x" * 5000,
    "\ud800",
]


def is_plain(name: str) -> bool:
    return re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?\.png", name) is not None and len(name) < 90


@pytest.mark.parametrize("prompt", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_prompts(prompt: str, tmp_path: Path) -> None:
    name = file_name(prompt, 0, DIGEST)
    assert is_plain(name)
    assert (tmp_path / name).resolve().parent == tmp_path.resolve()


@given(st.text(), st.integers(0, 2**32 - 1))
@example("nul", 0)
def test_any_prompt(prompt: str, seed: int) -> None:
    name = file_name(prompt, seed, DIGEST)
    assert is_plain(name)
    assert name == file_name(prompt, seed, DIGEST)


def test_a_name_says_what_is_drawn() -> None:
    assert file_name("Red heart!", 7, DIGEST) == "red-heart-7-0123456789ab.png"
    assert file_name("Crème brûlée", 0, DIGEST) == "creme-brulee-0-0123456789ab.png"
    assert file_name("赤いハート", 0, DIGEST) == "picture-0-0123456789ab.png"


@pytest.mark.parametrize("digest", ["", "012", "../0123456789ab", "0123456789AB"])
def test_a_digest_is_hexadecimal(digest: str) -> None:
    with pytest.raises(ValueError, match="hexadecimal"):
        file_name("fox", 0, digest)
