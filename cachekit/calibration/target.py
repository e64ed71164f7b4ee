"""What is asked for: a speed or a quality."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from cachekit.calibration.measure import By, Measured

_TOLERANCE = 0.02


@dataclass(frozen=True)
class Target:
    """Exactly one of a speed-up and a quality.

    Attributes:
        speedup: at least so much faster than the uncached pipeline; 2 % less counts as reached, since computed calls
            are whole.
        min_psnr: dB that 95 % of the pictures reach.
        by: what a speed-up is measured by: "work", "calls" or "time".

    Raises:
        ValueError: none or both given, or a bad value.
    """

    speedup: float | None = None
    min_psnr: float | None = None
    by: By = "work"

    def __post_init__(self) -> None:
        if (self.speedup is None) == (self.min_psnr is None):
            raise ValueError("give exactly one of speedup and min_psnr")
        if self.speedup is not None and not (math.isfinite(self.speedup) and self.speedup > 1):
            raise ValueError(f"speedup: a number above 1, got {self.speedup!r}")
        if self.min_psnr is not None and not 0 < self.min_psnr < 100:
            raise ValueError(f"min_psnr: decibels between 0 and 100, got {self.min_psnr!r}")
        if self.by not in get_args(By):
            raise ValueError(f"by: one of {', '.join(get_args(By))}, got {self.by!r}")

    def reached(self, measured: Measured, slack: float = 0.0) -> bool:
        """True when a setting is as fast, or as good, as asked for.

        Args:
            measured: the setting.
            slack: part of the speed-up (or dB / 10) that may be missing.
        """
        if self.speedup is not None:
            return measured.speedup(self.by) >= self.speedup * (1 - _TOLERANCE - slack)
        assert self.min_psnr is not None
        return measured.skips_or_shortens and measured.low >= self.min_psnr - 10 * slack

    def too_fast(self, measured: Measured) -> bool:
        """True on the fast side of the target, from where a search turns back to more careful settings."""
        return self.reached(measured) if self.speedup is not None else measured.low < float(self.min_psnr or 0)

    def exact(self, measured: Measured) -> bool:
        """True when a search need not go on: the speed-up is met and hardly more than that."""
        return self.speedup is not None and abs(measured.speedup(self.by) / self.speedup - 1) <= _TOLERANCE

    def best(self, found: list[Measured], slack: float = 0.0) -> Measured | None:
        """Of the settings that reach the target the best one: by mean PSNR, or of a quality by speed."""
        reached = [measured for measured in found if self.reached(measured, slack)]
        if self.speedup is not None:
            return max(reached, key=lambda item: (item.mean, item.speedup(self.by)), default=None)
        return max(reached, key=lambda item: (item.speedup(self.by), item.mean), default=None)

    def nearest(self, found: list[Measured]) -> Measured:
        """What comes closest to the target."""
        if self.speedup is not None:
            return max(found, key=lambda item: (item.speedup(self.by), item.mean))
        return max(found, key=lambda item: (item.skips_or_shortens, item.low))

    def __str__(self) -> str:
        if self.speedup is not None:
            return f"speed-up {self.speedup:g}x by {self.by}"
        return f"{self.min_psnr:g} dB for 95 % of the pictures"
