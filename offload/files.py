"""Where the tensors of safetensors files lie, so that one can be read straight into a buffer.

The format (https://github.com/huggingface/safetensors): eight bytes with the length of the header, the header as JSON,
then the tensors, contiguous and little-endian.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from offload.errors import OffloadError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `nbytes` from `offset` on."""

    path: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, Stored]:
    """Name -> place of every tensor of a safetensors file.

    Raises:
        OffloadError: the file is cut off or not of this format, or holds a dtype that is not known here.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError("the header does not fit into the file")
            header = json.loads(file.read(length))
        start = 8 + length
        found: dict[str, Stored] = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= size - start:
                raise ValueError(f"{name} lies outside of the file")
            dtype = _DTYPES.get(entry["dtype"])
            if dtype is None:
                raise ValueError(f"{name} has the dtype {entry['dtype']}, which cannot be read in parts")
            shape = tuple(int(length) for length in entry["shape"])
            if end - begin != torch.Size(shape).numel() * dtype.itemsize:
                raise ValueError(f"{name} has another size than its shape says")
            found[name] = Stored(path, start + begin, end - begin, dtype, shape)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OffloadError(f"{path} is no complete safetensors file ({error}); write or download it again") from error
    return found


def read_into(wanted: Iterable[tuple[Stored, torch.Tensor]]) -> None:
    """Read tensors into flat uint8 tensors in host memory, of as many bytes each.

    Raises:
        OffloadError: a file is gone, or shorter than it was.
    """
    for path, items in _by_file(wanted).items():
        try:
            with path.open("rb", buffering=0) as file:
                for stored, target in items:
                    view = memoryview(target.numpy().data)
                    file.seek(stored.offset)
                    while len(view):
                        count = file.readinto(view)
                        if not count:
                            raise OSError("it ends early")
                        view = view[count:]
        except OSError as error:
            raise OffloadError(
                f"weights could not be read from {path} ({error}); keep the files of an offloaded pipeline in place"
            ) from error


def _by_file(wanted: Iterable[tuple[Stored, torch.Tensor]]) -> dict[Path, list[tuple[Stored, torch.Tensor]]]:
    if sys.byteorder != "little":
        raise OffloadError("safetensors files are little-endian, this machine is not; use the mode 'group'")
    files: dict[Path, list[tuple[Stored, torch.Tensor]]] = {}
    for stored, target in wanted:
        if stored.nbytes:
            files.setdefault(stored.path, []).append((stored, target))
    for items in files.values():
        items.sort(key=lambda item: item[0].offset)
    return files
