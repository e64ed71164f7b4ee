"""Results are written atomically: a reader sees the old file or the new one, never a part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from cachekit.output import write


def write_tensors(path: str | Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Path:
    """Write one safetensors file.

    Raises:
        OSError: when the folder does not exist or cannot be written.
    """
    return _write(Path(path), save(tensors, metadata))


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
    return _write(Path(path), text.encode())


def _write(target: Path, data: bytes) -> Path:
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {target}: the folder {target.parent} does not exist; make it first")
    return write(target, data)
