"""What a cache leaves to compute, in steps: counted floating-point operations, not calls.

A skipped call of FirstBlock still runs a block, one of Pyramid Attention Broadcast everything but attention. Counting
operations puts all of them beside the same control: as many uncached steps as cost the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import cachekit
from cachekit.demo.drawing import caching, draw

# Fused attention that torch's own counter leaves out.
_UNCOUNTED = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math_for_mps")


def _attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Operations of one attention, from the shapes."""
    return int(sdpa_flop_count(query, key, value))


def flops(pipe: Any, prompt: str, steps: int, seed: int, config: cachekit.CacheConfig | None = None) -> int:
    """Floating-point operations of one run up to the latents: products of matrices, convolutions and attention."""
    found = (getattr(torch.ops.aten, name, None) for name in _UNCOUNTED)
    formulas = {operation: _attention for operation in found if operation is not None}
    with caching(pipe, config), FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        draw(pipe, prompt, steps, seed, output_type="latent")
    return int(counter.get_total_flops())


@dataclass(frozen=True)
class StepCost:
    """Operations of an uncached run: `constant` (the prompt) and `per_step`."""

    constant: int
    per_step: int

    @classmethod
    def of(cls, pipe: Any, prompt: str, seed: int) -> StepCost:
        """Measured on two short uncached runs."""
        two, three = (flops(pipe, prompt, steps, seed) for steps in (2, 3))
        return cls(two - 2 * (three - two), three - two)

    def steps(self, count: int) -> float:
        """How many uncached steps cost `count` operations."""
        return (count - self.constant) / self.per_step
