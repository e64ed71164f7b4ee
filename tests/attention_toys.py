"""A toy video denoiser with all three types of attention, which counts the calls of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .toys import WIDTH

FRAMES, TOKENS = 3, 4


class Attention(nn.Module):
    """Single-head attention of `hidden_states` [batch, tokens, width] to itself or to `encoder_hidden_states`."""

    def __init__(self, context: int = WIDTH) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = nn.Linear(WIDTH, WIDTH), nn.Linear(context, WIDTH), nn.Linear(context, WIDTH)
        self.calls = 0

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        self.calls += 1
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        return nn.functional.scaled_dot_product_attention(
            self.to_q(hidden_states), self.to_k(context), self.to_v(context)
        )


class VideoBlock(nn.Module):
    """Attention within each frame, along the frames, and to the prompt. What attends has names that say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.temporal, self.two = Attention(), Attention(), Attention()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        batch, frames, tokens, width = hidden_states.shape
        x = hidden_states.flatten(0, 1)
        x = x + self.one(x)
        x = x.reshape(batch, frames, tokens, width).transpose(1, 2).flatten(0, 1)
        x = x + self.temporal(x)
        x = x.reshape(batch, tokens, frames, width).transpose(1, 2).flatten(1, 2)
        x = x + self.out(self.two(x, encoder_hidden_states))
        return x.reshape(hidden_states.shape)


class Video(nn.Module):
    """Denoiser of `hidden_states` [batch, FRAMES, TOKENS, WIDTH] under a prompt [batch, tokens, WIDTH]."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(VideoBlock() for _ in range(blocks))
        self.eval().requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def forward(
        self, hidden_states: Tensor, timestep: Any, encoder_hidden_states: Tensor, return_dict: bool = False
    ) -> tuple[Tensor]:
        x = hidden_states + 0.1 * torch.as_tensor(timestep).float().sin().max().to(hidden_states.dtype)
        for block in self.blocks:
            x = block(x, encoder_hidden_states)
        return (x,)

    def calls(self) -> dict[str, int]:
        """Calls of the first block's attention by type."""
        block = self.blocks[0]
        return {"spatial": block.one.calls, "temporal": block.temporal.calls, "cross": block.two.calls}


def video_latents(batch: int = 1, tokens: int = TOKENS) -> Tensor:
    """Random latents; equal arguments give equal tensors."""
    return torch.randn(batch, FRAMES, tokens, WIDTH, generator=torch.Generator().manual_seed(5))


def video_prompt(seed: int = 0, batch: int = 1) -> Tensor:
    """A prompt of five tokens."""
    return torch.randn(batch, 5, WIDTH, generator=torch.Generator().manual_seed(seed))
