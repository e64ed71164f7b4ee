"""Files of results: safetensors with a JSON header, and text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from cachekit.files import write_atomically


def write_tensors(path: str | Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Path:
    """Write one safetensors file.

    Raises:
        OSError: when the folder does not exist or cannot be written.
    """
    return write_atomically(Path(path), save(tensors, metadata))


def read_tensors(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when it is no safetensors file.
    """
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"no file at {source}")
    try:
        with safe_open(source, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{source} is not a safetensors file: {error}") from None


def header_of(path: str | Path, metadata: dict[str, str], form: str, version: int, missing: str) -> dict[str, Any]:
    """The JSON header of a file of ours.

    Args:
        path: of the file, for messages.
        metadata: from :func:`read_tensors`.
        form: what the header calls this kind of file.
        version: the newest version that can be read.
        missing: what to say of a file of another kind.

    Raises:
        ValueError: another kind of file, or written by a newer version.
    """
    try:
        header: dict[str, Any] = json.loads(metadata["cachekit"])
    except (KeyError, json.JSONDecodeError):
        header = {}
    if header.get("format") != form:
        raise ValueError(f"{path} holds {missing}")
    if header["version"] > version:
        raise ValueError(f"{path} was written by a newer cachekit (format {header['version']}); update cachekit")
    return header


def write_text(path: str | Path, text: str) -> Path:
    """Write a text file in UTF-8.

    Raises:
        OSError: when the folder does not exist or cannot be written.
    """
    return write_atomically(Path(path), text.encode())
