"""A toy denoiser with cross-attention whose projections are counted, with switches for what real models do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, TEXT = 8, 6


class Attention(nn.Module):
    """`writes` overwrites its keys in place after projecting, as fused rotary embeddings do."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.to_q, self.to_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.to_k, self.to_v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.writes = writes

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        key = self.to_k(context)
        if self.writes:
            key.mul_(x.mean()).add_(1)
        return self.to_out(torch.nn.functional.scaled_dot_product_attention(self.to_q(x), key, self.to_v(context)))


class Block(nn.Module):
    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.attn = Attention(writes)

    def forward(self, hidden_states: Tensor, context: Tensor, temb: Tensor) -> Tensor:
        return hidden_states + self.attn(hidden_states + temb, context)


class Caption(nn.Module):
    """Two projections in one module."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(TEXT, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, text: Tensor) -> Tensor:
        return self.linear_2(self.dropout(torch.nn.functional.silu(self.linear_1(text))))


class CrossStack(nn.Module):
    """`hidden_states` [batch, tokens, WIDTH], `timestep` a number or a tensor, `encoder_hidden_states` [.., TEXT].

    Args:
        n: number of blocks.
        writes: attention overwrites its keys in place.
        scaled: how the context is multiplied by the timestep: "" not at all, "tensor", "item" or "tolist".
        joint: the context is changed by the latents before the first block.
    """

    def __init__(
        self, n: int = 3, writes: bool = False, scaled: str = "", joint: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.caption = Caption(dropout)
            self.blocks = nn.ModuleList(Block(writes) for _ in range(n))
        self.scaled, self.joint = scaled, joint
        self.eval().requires_grad_(False)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor | float,
        encoder_hidden_states: Tensor,
        control: Tensor | None = None,
        flag: Any = None,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        temb = torch.as_tensor(timestep).to(hidden_states.dtype).reshape(-1, 1, 1) / 8
        context = self.caption(encoder_hidden_states)
        if self.scaled == "tensor":
            context = context * temb
        elif self.scaled == "item":
            context = context * torch.as_tensor(timestep).item()
        elif self.scaled == "tolist":
            context = context * torch.as_tensor(timestep).reshape(-1).tolist()[0]
        if self.joint:
            context = context + hidden_states.mean(dim=1, keepdim=True)
        x = hidden_states if control is None else hidden_states + control
        for block in self.blocks:
            x = block(x, context, temb)
        return (x,)


def text(seed: int = 0, batch: int = 1, tokens: int = 5) -> Tensor:
    """Random prompt embeddings [batch, tokens, TEXT]."""
    return torch.randn(batch, tokens, TEXT, generator=torch.Generator().manual_seed(500 + seed))


def noise(batch: int = 1, tokens: int = 4) -> Tensor:
    """Random latents [batch, tokens, WIDTH]."""
    return torch.randn(batch, tokens, WIDTH, generator=torch.Generator().manual_seed(1))


@contextmanager
def counted_linears(model: nn.Module) -> Iterator[Counter[str]]:
    """Path of a linear layer -> how often it really ran."""
    counts: Counter[str] = Counter()

    def count(path: str) -> Any:
        return lambda module, args: counts.update([path])

    linears = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_pre_hook(count(path)) for path, module in linears]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()
