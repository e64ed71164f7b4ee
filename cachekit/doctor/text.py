"""A report as a block of text that can be pasted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cachekit.doctor.report import Report


def render(report: Report) -> str:
    """A fenced block: it stays as it is where Markdown is read."""
    facts = [
        ("cachekit", report.cachekit),
        ("Python", report.python),
        ("system", report.system),
        ("torch for", f"{report.backend}, {report.threads} threads"),
        *((name, value) for name, value in report.settings.items()),
    ]
    installed = [(part.name, part.version, part.brings) for part in report.parts if part.version]
    absent = [(part.name, f"{part.brings}: {part.install}") for part in report.parts if not part.version]
    lines = [
        *_table(facts),
        *_section("needed", [(item.name, item.version or "missing", item.problem) for item in report.packages]),
        *_section("optional", installed),
        *_section("optional, not installed", absent),
        *_section("devices", [(line,) for line in report.devices]),
        *_section("checks", [("ok" if c.passed else "FAILED", c.name, c.detail) for c in report.checks]),
    ]
    return "\n".join(["```text", *lines, "```"])


def _section(title: str, rows: Iterable[Sequence[str | None]]) -> list[str]:
    table = _table(rows)
    return ["", title, *(f"  {line}" for line in table)] if table else []


def _table(rows: Iterable[Sequence[str | None]]) -> list[str]:
    """Rows with columns below each other; the last one is not filled up."""
    texts = [[cell or "" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts]
