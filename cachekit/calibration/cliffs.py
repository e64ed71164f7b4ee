"""Cliffs: places where a small change of a threshold loses much quality, or much of the work at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cachekit.calibration.measure import Measured

NEAR = 1.11
"""Thresholds within this factor count as a small change."""
LOSS_DB = 3.0
JUMP = 1.25


@dataclass(frozen=True)
class Cliff:
    """Two neighbouring thresholds that differ little and give something else.

    Attributes:
        careful: the smaller threshold.
        fast: the larger one.
    """

    careful: Measured
    fast: Measured

    @property
    def loss(self) -> float:
        """dB lost, on the mean or the 5th percentile, whichever is more."""
        return max(self.careful.mean - self.fast.mean, self.careful.low - self.fast.low)

    @property
    def jump(self) -> float:
        """Factor between the speed-ups by work."""
        return self.fast.speedup() / self.careful.speedup()

    def to_dict(self) -> dict[str, float]:
        """Figures as plain values."""
        return {
            "careful": self.careful.setting.value,
            "fast": self.fast.setting.value,
            "loss_db": self.loss,
            "jump": self.jump,
        }

    def __str__(self) -> str:
        return (
            f"cliff between {self.careful.setting.value:g} and {self.fast.setting.value:g}: {self.loss:.1f} dB lost, "
            f"{self.careful.speedup():.2f}x to {self.fast.speedup():.2f}x"
        )


def find_cliffs(curve: Sequence[Measured]) -> tuple[Cliff, ...]:
    """Cliffs of one axis of thresholds, measured at rising values."""
    return tuple(
        cliff
        for careful, fast in pairwise(curve)
        if fast.setting.value <= careful.setting.value * NEAR
        for cliff in [Cliff(careful, fast)]
        if cliff.loss >= LOSS_DB or cliff.jump >= JUMP
    )
