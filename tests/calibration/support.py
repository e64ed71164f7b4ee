"""A pipeline whose denoiser is known in closed form, so that a calibration takes a moment."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

import cachekit as ck

SHAPE = (4, 4, 4)
PROMPTS = ("fox", "lion", "red heart", "banana", "octopus", "tree")


class Mixture(nn.Module):
    """Ideal denoiser of data whose every value lies around -1 or around 1, each more or less likely by the prompt.

    Predicts the velocity of flow matching, or, given `alphas` (cumulative products by timestep), the noise.
    """

    width = 0.5

    def __init__(self, alphas: Tensor | None = None) -> None:
        super().__init__()
        self.alphas = alphas
        self.weight = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> tuple[Tensor]:
        if self.alphas is None:
            share = (timestep / 1000).clamp_min(1e-3)
            clean = self._clean(sample, 1 - share, share, encoder_hidden_states)
            return (self.weight * (sample - clean) / share,)
        alpha = self.alphas[timestep.long().clamp(0, len(self.alphas) - 1)]
        signal, noise = alpha.sqrt(), (1 - alpha).sqrt()
        clean = self._clean(sample, signal, noise, encoder_hidden_states)
        return (self.weight * (sample - signal * clean) / noise,)

    def _clean(self, x: Tensor, signal: Tensor, noise: Tensor, text: Tensor) -> Tensor:
        """Mean of d given x = signal * d + noise * n."""
        variance = (signal * self.width) ** 2 + noise**2
        centre = torch.tanh(signal * x / variance + text)
        return centre + signal * self.width**2 / variance * (x - signal * centre)


class MixturePipeline(DiffusionPipeline):
    """Draws from :class:`Mixture` with guidance in two calls."""

    def __init__(self, transformer: nn.Module, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)
        self.set_progress_bar_config(disable=True)
        self.sizes: list[int] = []

    @torch.no_grad()
    def __call__(
        self,
        prompt: Sequence[str],
        num_inference_steps: int = 12,
        generator: Sequence[torch.Generator] = (),
        output_type: str = "pt",
        guidance: float = 2.0,
        scale: float = 1.0,
    ) -> tuple[Tensor]:
        self.sizes.append(len(prompt))
        self.scheduler.set_timesteps(num_inference_steps)
        given = list(generator) or [torch.Generator().manual_seed(index) for index in range(len(prompt))]
        x = scale * torch.stack([torch.randn(SHAPE, generator=item) for item in given])
        x = x * getattr(self.scheduler, "init_noise_sigma", 1.0)
        text = torch.stack([_embedded(item) for item in prompt])
        noise = torch.Generator().manual_seed(0)
        for t in self.scheduler.timesteps:
            model_input = self.scheduler.scale_model_input(x, t) if hasattr(self.scheduler, "scale_model_input") else x
            cond = self.transformer(model_input, t, encoder_hidden_states=text)[0]
            uncond = self.transformer(model_input, t, encoder_hidden_states=torch.zeros_like(text))[0]
            x = self._advance(uncond + guidance * (cond - uncond), t, x, noise)
        return (x if output_type == "latent" else x / 2 + 0.5,)

    def _advance(self, output: Tensor, t: Tensor, x: Tensor, generator: torch.Generator) -> Tensor:
        extra = {"generator": generator} if "generator" in inspect.signature(self.scheduler.step).parameters else {}
        result: Tensor = self.scheduler.step(output, t, x, **extra, return_dict=False)[0]
        return result


def mixture(scheduler: Any = None) -> MixturePipeline:
    """A pipeline with that scheduler, flow matching by default."""
    alphas = getattr(scheduler, "alphas_cumprod", None)
    return MixturePipeline(Mixture(alphas), scheduler or FlowMatchEulerDiscreteScheduler())


def calibrated(pipe: Any, prompts: Sequence[str] = PROMPTS, steps: int = 12, **options: Any) -> ck.Profile:
    """A quick calibration."""
    given: dict[str, Any] = {"budgets": [4, 6], "evaluations": 1, "held_back": 0.3, "progress": False, **options}
    return ck.calibrate(pipe, list(prompts), steps, **given)


def _embedded(text: str) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
