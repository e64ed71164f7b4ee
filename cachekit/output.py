"""Folders for results: checked before anything is computed, files written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def prepare(folder: Path) -> Path:
    """Make the folder and prove that it takes files.

    Raises:
        OSError: it cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return folder


def write(path: Path, data: bytes) -> Path:
    """Write a file atomically: a reader sees the old one or the new one, never a part.

    Raises:
        OSError: the folder cannot be written.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path
