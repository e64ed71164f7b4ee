"""The demo's folder: checked before anything is computed."""

from __future__ import annotations

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
