"""Artefacts of tiny pipelines that tests share, and a denoiser small enough to be compiled."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from recipes import artefacts

from ...pipelines.tiny import TINY

SD = TINY["sd15"]
STEPS = 3


def arguments(name: str = "sd15", guidance: bool = True) -> dict[str, Any]:
    """What a tiny pipeline is called with, as `TinyPipeline.call` does."""
    tiny = TINY[name]
    given: dict[str, Any] = {"prompt": "a cat", **tiny.sizes[0], **tiny.common}
    if tiny.per_size is not None:
        given |= tiny.per_size(tiny.sizes[0])
    given |= tiny.guided if guidance else tiny.unguided
    return given | ({"negative_prompt": "blurry"} if guidance and tiny.negative else {})


@cache
def built(name: str = "sd15", kind: str = "trace", guidance: bool = True) -> artefacts.Artefact:
    return artefacts.build(TINY[name].build(), kind, **arguments(name, guidance))


@cache
def base(name: str = "sd15", guidance: bool = True) -> torch.Tensor:
    """What the pipeline draws by itself."""
    return TINY[name].call(TINY[name].build(), steps=STEPS, guidance=guidance)


class ToyDenoiser(nn.Module):
    """Four operations; `decides` makes it choose by a value, which no trace can see."""

    def __init__(self, decides: bool = False) -> None:
        super().__init__()
        self.proj, self.decides = nn.Linear(8, 8), decides

    @property
    def dtype(self) -> torch.dtype:
        return self.proj.weight.dtype

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor, return_dict: bool = True) -> Any:
        if self.decides and bool(timestep.max() < 300):
            hidden_states = hidden_states * 2
        return (torch.tanh(self.proj(hidden_states)) * torch.cos(timestep / 1000),)


class ToyPipeline:
    """Calls its denoiser at falling timesteps."""

    def __init__(self, decides: bool = False) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.transformer: Any = ToyDenoiser(decides).eval()

    @property
    def components(self) -> dict[str, Any]:
        return {"transformer": self.transformer}

    def __call__(
        self, num_inference_steps: int = 2, generator: torch.Generator | None = None, output_type: str = "latent"
    ) -> torch.Tensor:
        latents = torch.randn(1, 4, 8, generator=generator)
        for time in torch.linspace(999, 1, num_inference_steps):
            latents = latents - 0.1 * self.transformer(latents, time, return_dict=False)[0]
        return latents
