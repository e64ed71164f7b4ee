"""The moving loop: what a pipeline does to a denoiser, without the pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .case import Case, Inputs


def batched(case: Case, uncond: Inputs, cond: Inputs) -> Inputs:
    """One call for both branches, `[uncond, cond]` on the batch dimension."""
    if not case.supports_batch:
        raise ValueError(f"{case.name} takes one sample: {case.batch_note}")
    return {
        name: uncond[name] if name in case.unbatched else _join(uncond[name], cond[name], name in case.joined)
        for name in uncond
    }


def _join(first: Any, second: Any, per_sample: bool) -> Any:
    if isinstance(first, Tensor):
        return torch.cat([first, second]) if first.ndim else first
    if isinstance(first, dict):
        return {key: _join(first[key], second[key], per_sample) for key in first}
    if isinstance(first, (list, tuple)):
        if per_sample:
            return first + second
        return type(first)(_join(a, b, per_sample) for a, b in zip(first, second, strict=True))
    return first


@torch.no_grad()
def run(
    case: Case,
    model: nn.Module,
    steps: int = 10,
    branches: int = 2,
    batch: int = 1,
    batched_cfg: bool = False,
    size: int = 0,
) -> list[Tensor]:
    """Sample without a scheduler: latents and timesteps move along a fixed, smooth way.

    Returns:
        One output per call: `steps * branches` in the order of the calls, or `steps` when `batched_cfg`.
    """
    start = [case.inputs(branch, batch, size) for branch in range(branches)]
    outputs = []
    for index, timestep in enumerate(case.timesteps(steps)):
        alpha = (index / max(steps - 1, 1)) ** 1.3
        calls = [case.at(kwargs, timestep, alpha) for kwargs in start]
        if batched_cfg:
            calls = [batched(case, *calls)]
        outputs += [case.output(model(**kwargs)) for kwargs in calls]
    return outputs
