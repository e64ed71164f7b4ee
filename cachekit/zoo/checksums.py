"""SHA-256 of the embedded weights, recorded in `checksums.json`.

``python -m cachekit.zoo.checksums`` records them anew after a training.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from cachekit.files import write_atomically
from cachekit.zoo.pipelines import entry, names

RECORD = Path(__file__).parent / "checksums.json"


def measured(name: str) -> dict[str, str]:
    """Weight file of an embedded pipeline -> SHA-256 of what is on the disk.

    Raises:
        ValueError: no pipeline has this name.
        OSError: a file cannot be read.
    """
    folder = entry(name).folder
    files = sorted(folder.rglob("*.safetensors"))
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def recorded() -> dict[str, dict[str, str]]:
    """Name of a pipeline -> weight file -> SHA-256, as shipped."""
    return json.loads(RECORD.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def damage(name: str) -> list[str]:
    """What is wrong with the weights of an embedded pipeline, a line for each file; empty if nothing is.

    Raises:
        ValueError: no pipeline has this name.
        OSError: a file cannot be read.
    """
    here, shipped = measured(name), recorded().get(name)
    if shipped is None:
        return [f"no checksums are recorded for {name}"]
    lines = [f"{file} is missing" for file in shipped if file not in here]
    lines += [f"{file} is not recorded" for file in here if file not in shipped]
    return lines + [f"{file} has changed" for file in here if shipped.get(file, here[file]) != here[file]]


def record() -> None:
    """Write the record from what is on the disk."""
    found = {name: measured(name) for name in names()}
    write_atomically(RECORD, (json.dumps(found, indent=2, sort_keys=True) + "\n").encode())


if __name__ == "__main__":
    record()
