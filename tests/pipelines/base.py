"""What the end-to-end tests know about one tiny pipeline: how to build it, call it, and how it uses its denoisers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import DiffusionPipeline

StepCallback = Callable[[DiffusionPipeline, int, Any, dict[str, Any]], dict[str, Any]]
NEGATIVE = "blurry"


@dataclass(frozen=True)
class TinyPipeline:
    """A genuine diffusers pipeline with random weights, small enough to run in well under a second.

    `two_call_guidance` and `batched_guidance` say how guidance reaches the denoiser: one more call per step, or one
    call on a doubled batch; neither holds for a model that only takes guidance as an embedding. `cond_first` is the
    order of the two calls, or of the two halves of the batch. `negative` says that a negative prompt is accepted,
    `legacy_callback` that only the older `callback` is (such a pipeline ignores `callback_on_step_end` silently).
    """

    name: str
    make: Callable[[], DiffusionPipeline]
    sizes: tuple[Mapping[str, int], Mapping[str, int]]
    guided: Mapping[str, Any]
    unguided: Mapping[str, Any]
    denoisers: tuple[str, ...] = ("transformer",)
    two_call_guidance: bool = False
    batched_guidance: bool = False
    cond_first: bool = True
    is_video: bool = False
    negative: bool = True
    legacy_callback: bool = False
    common: Mapping[str, Any] = field(default_factory=dict)
    per_size: Callable[[Mapping[str, int]], dict[str, Any]] | None = None

    def __str__(self) -> str:
        return self.name

    def build(self) -> DiffusionPipeline:
        """A new pipeline in eval mode; equal weights at every call, the global random state is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pipe = self.make()
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def call(
        self,
        pipe: DiffusionPipeline,
        *,
        steps: int = 8,
        guidance: bool = True,
        prompt: str | Sequence[str] = "a cat",
        seed: int = 0,
        size: int = 0,
        batch: int = 1,
        callback: StepCallback | None = None,
        **extra: Any,
    ) -> torch.Tensor:
        """Run the pipeline and return its float32 output, latents unless `extra` asks for another `output_type`.

        `prompt` is repeated `batch` times unless it is a sequence; `extra` goes to the pipeline and wins. What
        `callback` returns is used where the pipeline supports it; an exception in it aborts the run everywhere.
        """
        prompts = [prompt] * batch if isinstance(prompt, str) else list(prompt)
        single = len(prompts) == 1
        kwargs: dict[str, Any] = {"output_type": "latent", **self.sizes[size], **self.common}
        if self.per_size is not None:
            kwargs.update(self.per_size(self.sizes[size]))
        kwargs.update(self.guided if guidance else self.unguided)
        if guidance and self.negative:
            kwargs["negative_prompt"] = NEGATIVE if single else [NEGATIVE] * len(prompts)
        if callback is not None and self.legacy_callback:
            kwargs["callback"] = lambda index, timestep, latents: callback(pipe, index, timestep, {"latents": latents})
        elif callback is not None:
            kwargs["callback_on_step_end"] = callback
        kwargs.update(
            prompt=prompts[0] if single else prompts,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(seed),
            return_dict=False,
        )
        kwargs.update(extra)
        output = pipe(**kwargs)[0]
        return (torch.stack(list(output)) if isinstance(output, list) else torch.as_tensor(output)).float()
