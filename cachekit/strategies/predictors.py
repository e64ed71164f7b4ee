"""Predictors: what a skipped site would have returned. Pure: a predictor keeps nothing between calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cachekit.engine.clock import View


@dataclass(frozen=True)
class Reuse:
    """The last computed result."""

    @property
    def depth(self) -> int:
        return 1

    def predict(self, steps: Sequence[int], values: Sequence[torch.Tensor], now: View) -> torch.Tensor:
        return values[0]


@dataclass(frozen=True)
class Taylor:
    """Extrapolation of the last `order` + 1 computed results with divided differences (Newton's form).

    The forecast of TaylorSeer (Liu et al., "From Reusing to Forecasting", 2025) on the steps really computed, however
    they are spaced: exact on polynomials of degree `order` in the step index, and on results that do not change. With
    fewer results the order is lower.
    """

    order: int

    @property
    def depth(self) -> int:
        return self.order + 1

    def predict(self, steps: Sequence[int], values: Sequence[torch.Tensor], now: View) -> torch.Tensor:
        if len(values) < 2 or not self.order:
            return values[0]
        if self.order == 1:
            return torch.lerp(values[0], values[1], (now.step - steps[0]) / (steps[1] - steps[0]))
        dtype = torch.promote_types(values[0].dtype, torch.float32)
        column = [value.to(dtype) for value in values[: self.depth]]
        forecast, factor = column[0], 1.0
        for order in range(1, len(column)):
            column = [(column[i] - column[i + 1]) / (steps[i] - steps[i + order]) for i in range(len(column) - 1)]
            factor *= now.step - steps[order - 1]
            forecast = forecast + factor * column[0]
        return forecast.to(values[0].dtype)
