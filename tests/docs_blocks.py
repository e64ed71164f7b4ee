"""Fenced blocks of the Markdown pages, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^(?P<mark><!-- runs -->\n+)?```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        language: what follows the opening fence.
        text: what stands between the fences.
        line: number of its first line in the page.
        runs: whether `<!-- runs -->` stands before it.
    """

    language: str
    text: str
    line: int
    runs: bool

    def commands(self) -> Iterator[list[str]]:
        """The commands of a shell block as words; variables set in front, pipes and redirections are left out."""
        for line in self.text.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|(?!\|)|;", line.split(" #")[0]):
                words = shlex.split(part, comments=True)
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words = words[1:]
                if words:
                    yield words


def pages() -> list[Path]:
    """All Markdown pages that show code."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "cachekit").rglob("*.md")]
    return [*found, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            found["language"].strip(), found["text"], text.count("\n", 0, found.start("text")) + 1, bool(found["mark"])
        )
        for found in FENCE.finditer(text)
    ]
