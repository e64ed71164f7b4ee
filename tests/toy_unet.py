"""A toy UNet whose block calls are counted: any number of levels, with or without a middle block, in place or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Down(nn.Module):
    """Halves the sides and returns `(sample, (skip,))`; `in_place` overwrites the input, which is a skip too."""

    def __init__(self, level: int, in_place: bool) -> None:
        super().__init__()
        self.level, self.in_place, self.calls = level, in_place, 0
        self.weight = nn.Parameter(torch.tensor(0.5 + level / 8), requires_grad=False)

    def forward(self, hidden_states: Tensor, temb: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        self.calls += 1
        if self.in_place:
            hidden_states.mul_(1.25).add_(temb)
        x = torch.sin(self.weight * hidden_states + temb)
        # Odd sides leave a column over, as convolutions with a stride do.
        x = x[..., ::2, ::2]
        return x, (x,)


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.weight = nn.Parameter(torch.tensor(0.75), requires_grad=False)

    def forward(self, hidden_states: Tensor, temb: Tensor) -> Tensor:
        self.calls += 1
        return hidden_states + torch.cos(self.weight * hidden_states + temb)


class Up(nn.Module):
    def __init__(self, level: int, in_place: bool) -> None:
        super().__init__()
        self.level, self.in_place, self.calls = level, in_place, 0
        self.weight = nn.Parameter(torch.tensor(0.5 - level / 16), requires_grad=False)

    def forward(self, hidden_states: Tensor, skip: Tensor, temb: Tensor) -> Tensor:
        self.calls += 1
        x = nn.functional.interpolate(hidden_states, size=skip.shape[-2:])
        if self.in_place:
            hidden_states.mul_(0.5)
        return x + torch.sin(self.weight * skip + temb)


class ToyUNet(nn.Module):
    """`sample` [batch, channels, height, width] of any size, `timestep` a number or [batch].

    Args:
        levels: blocks of each half.
        middle: whether there is a middle block.
        in_place: whether blocks overwrite what they are given.
        own_skips: whether an up block is given the result of its mirror image (as in UNet1DModel) instead of what
            that block was given; then the deep part can overwrite a skip of the part that always runs.
    """

    def __init__(self, levels: int = 3, middle: bool = True, in_place: bool = False, own_skips: bool = False) -> None:
        super().__init__()
        self.own_skips = own_skips
        self.down_blocks = nn.ModuleList(Down(level, in_place) for level in range(levels))
        self.mid_block = Middle() if middle else None
        self.up_blocks = nn.ModuleList(Up(level, in_place) for level in range(levels))

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor | float,
        encoder_hidden_states: Tensor | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        temb = torch.as_tensor(timestep).to(sample.dtype).reshape(-1, 1, 1, 1) / 16
        if encoder_hidden_states is not None:
            temb = temb + encoder_hidden_states.mean(dim=(1, 2)).reshape(-1, 1, 1, 1)
        x = sample * 1.0
        skips: list[Tensor] = [x]
        for block in self.down_blocks:
            x, more = block(x, temb)
            skips += more
        if not self.own_skips:
            skips.pop()
        if self.mid_block is not None:
            x = self.mid_block(x, temb)
        for block in self.up_blocks:
            x = block(x, skips.pop(), temb)
        return (nn.functional.interpolate(x, size=sample.shape[-2:]),)

    @property
    def calls(self) -> list[int]:
        """Forward passes of each block in the order of execution."""
        middle: list[Any] = [] if self.mid_block is None else [self.mid_block]
        return [block.calls for block in (*self.down_blocks, *middle, *self.up_blocks)]


def noise(batch: int = 1, height: int = 8, width: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(batch, 2, height, width, generator=torch.Generator().manual_seed(seed))
