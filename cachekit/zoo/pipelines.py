"""Which pipelines are embedded, and how one is put together from its folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cachekit.zoo import glyphs

if TYPE_CHECKING:
    from diffusers import FluxPipeline


@dataclass(frozen=True)
class Entry:
    """One embedded pipeline.

    Attributes:
        folder: Its files in the layout of ``DiffusionPipeline.save_pretrained``.
        prompts: Returns the prompts it was trained on.
    """

    folder: Path
    prompts: Callable[[], list[str]]


ZOO: dict[str, Entry] = {
    "emoji-flux": Entry(Path(__file__).parent / "emoji_flux", glyphs.prompts),
}


def names() -> list[str]:
    """Return the names of the embedded pipelines."""
    return sorted(ZOO)


def entry(name: str) -> Entry:
    """Return the entry of a name.

    Raises:
        ValueError: No pipeline has this name; the message lists those that exist.
    """
    if name not in ZOO:
        raise ValueError(f"no embedded pipeline is called {name!r}; there is {', '.join(names())}")
    return ZOO[name]


def prompts(name: str) -> list[str]:
    """Return the training prompts of a pipeline, one per glyph. Raises ValueError for an unknown name."""
    return entry(name).prompts()


def load(name: str, device: str | torch.device | None = None, dtype: torch.dtype = torch.float32) -> FluxPipeline:
    """Load an embedded pipeline; needs no network.

    Args:
        name: One of :func:`names`.
        device: Where to put the models; None leaves them on the CPU.
        dtype: Type of the weights in memory (on disk they are float16).

    Returns:
        A plain ``diffusers.FluxPipeline`` whose call draws 64x64 pixels in 28 steps by default. Guidance is the
        classifier-free kind: ``pipe(prompt, negative_prompt="", true_cfg_scale=3.0)``.

    Raises:
        ValueError: No pipeline has this name.
    """
    return assemble(entry(name).folder, device, dtype)


def assemble(
    folder: Path, device: str | torch.device | None = None, dtype: torch.dtype = torch.float32
) -> FluxPipeline:
    """Build the pipeline from a folder in diffusers' layout; see :func:`load`."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel

    from cachekit.zoo.tokenizers import ShortT5Tokenizer

    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        vae=AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=dtype),
        text_encoder=CLIPTextModel.from_pretrained(folder / "text_encoder", torch_dtype=dtype),
        tokenizer=CLIPTokenizer.from_pretrained(folder / "tokenizer"),
        text_encoder_2=T5EncoderModel.from_pretrained(folder / "text_encoder_2", torch_dtype=dtype),
        tokenizer_2=ShortT5Tokenizer.from_pretrained(folder / "tokenizer_2"),
        transformer=FluxTransformer2DModel.from_pretrained(folder / "transformer", torch_dtype=dtype),
    )
    pipe.default_sample_size = glyphs.PICTURE_SIZE // pipe.vae_scale_factor
    return pipe if device is None else pipe.to(device)
