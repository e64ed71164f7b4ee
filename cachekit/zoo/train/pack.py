"""Stage 3: write the trained parts as a diffusers pipeline folder with float16 safetensors."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

from cachekit.zoo.train.text import TextEncoders

SHIFT = 1.0
"""Timestep shift of the scheduler: at 64 image tokens the plain schedule needs no push towards noise."""


def pack(folder: Path, vae: AutoencoderKL, text: TextEncoders, transformer: FluxTransformer2DModel) -> None:
    """Write the pipeline into ``folder``, replacing the parts of an earlier one and leaving other files alone."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT, use_dynamic_shifting=False)
    parts: dict[str, Any] = {
        "scheduler": scheduler,
        "vae": vae,
        "text_encoder": text.clip,
        "tokenizer": text.clip_tokenizer,
        "text_encoder_2": text.t5,
        "tokenizer_2": text.t5_tokenizer,
        "transformer": transformer,
    }
    index: dict[str, object] = {
        "_class_name": "FluxPipeline",
        "image_encoder": [None, None],
        "feature_extractor": [None, None],
    }
    for name, part in parts.items():
        target = folder / name
        shutil.rmtree(target, ignore_errors=True)
        on_disk: Any = deepcopy(part).half() if isinstance(part, torch.nn.Module) else part
        on_disk.save_pretrained(target)
        forget_origin(target / "config.json")
        index[name] = [*LIBRARIES[name]]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def forget_origin(config: Path) -> None:
    """Take the folder that a part was loaded from out of its configuration."""
    if config.is_file():
        values = json.loads(config.read_text())
        values.pop("_name_or_path", None)
        config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


LIBRARIES: dict[str, tuple[str, str]] = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "vae": ("diffusers", "AutoencoderKL"),
    "text_encoder": ("transformers", "CLIPTextModel"),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "text_encoder_2": ("transformers", "T5EncoderModel"),
    "tokenizer_2": ("cachekit.zoo.tokenizers", "ShortT5Tokenizer"),
    "transformer": ("diffusers", "FluxTransformer2DModel"),
}
"""Where ``DiffusionPipeline.from_pretrained`` finds the class of each part."""
