"""Measured settings as rows of text."""

from __future__ import annotations

from collections.abc import Sequence

from cachekit.calibration.measure import Measured

TITLES = ("", "setting", "computed", "by work", "by time", "PSNR dB", "5 %", "worst")

Row = tuple[str, ...]


def row(measured: Measured, mark: str = "", name: str = "") -> Row:
    """The figures of a setting, in the order of `TITLES`.

    Args:
        measured: the setting.
        mark: "*" for the one to use.
        name: what comes before the setting.
    """
    return (
        mark,
        f"{name}{measured.setting.label}",
        f"{measured.computed:.3g}/{measured.uncached_calls}",
        f"{measured.speedup():.2f}x",
        f"{measured.speedup('time'):.2f}x",
        *(f"{figure:.1f}" for figure in (measured.mean, measured.low, measured.worst)),
    )


def columns(rows: Sequence[Row]) -> list[str]:
    """Rows below `TITLES`, one line each, in columns."""
    cells = [TITLES, *rows]
    widths = [max(len(cell[column]) for cell in cells) for column in range(len(TITLES))]
    return [
        "  ".join(
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(cell, widths, strict=True))
        ).rstrip()
        for cell in cells
    ]
