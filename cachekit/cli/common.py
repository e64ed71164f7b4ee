"""What several commands need: devices, pipelines, silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cachekit.cli.app import UserError
from cachekit.run.loading import quieten


def chosen_device(name: str) -> str:
    """A device that torch has, from one of the accepted names."""
    import torch

    wanted, number = name.strip().lower(), name.strip().lower().removeprefix("cuda:")
    cards = torch.cuda.device_count()
    if wanted == "auto":
        return "cuda" if cards else "mps" if torch.backends.mps.is_available() else "cpu"
    if wanted == "cpu" or (wanted == "mps" and torch.backends.mps.is_available()) or (wanted == "cuda" and cards):
        return wanted
    if number.isdecimal() and wanted != number and int(number) < cards:
        return wanted
    if wanted == "mps":
        raise UserError("device 'mps' is not available here; use cpu or auto")
    if wanted == "cuda" or (number.isdecimal() and wanted != number):
        raise UserError(f"device {name!r} is not available here: torch sees {cards} CUDA devices; use cpu or auto")
    raise UserError(f"unknown device {name!r}; accepted: cpu, auto, cuda, cuda:N, mps")


def load_embedded(model: str, device: str) -> Any:
    from cachekit import zoo

    quieten()
    try:
        pipe = zoo.load(model, device=device)
    except OSError as error:
        raise UserError(f"the files of {model} cannot be read: {error}") from None
    pipe.set_progress_bar_config(disable=True)
    return pipe


def is_ours(category: type[Warning]) -> bool:
    from cachekit import CacheWarning

    return issubclass(category, CacheWarning)


def load_any(pipeline: str, device: str) -> Any:
    """An embedded pipeline, or one from a local folder in diffusers' layout."""
    from cachekit.run import RunError
    from cachekit.run.loading import load

    try:
        return load(pipeline, device)
    except RunError as error:
        raise UserError(str(error)) from None


def training_prompts(pipeline: str, count: int) -> list[str]:
    """Prompts of an embedded pipeline, evenly spread."""
    from cachekit import zoo

    if pipeline not in zoo.names():
        raise UserError("name a file with prompts of the kind that will be drawn: --prompts FILE")
    known = zoo.prompts(pipeline)
    return [known[i * len(known) // count] for i in range(min(count, len(known)))]


def prompt_lines(path: Path) -> list[str]:
    """The prompts of a text file, one per line."""
    try:
        texts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read prompts from {path}: {getattr(error, 'strerror', None) or error}") from None
    texts = [text for text in texts if text]
    if not texts:
        raise UserError(f"{path} holds no prompt; write one per line")
    return texts


def named_value(text: str, option: str = "--arg") -> tuple[str, Any]:
    """`name=value` as a name and a JSON value; what is no JSON is a text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UserError(f"{option} takes name=value, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
