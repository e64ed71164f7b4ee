"""The file of a profile: tensors, a versioned JSON header, and the identity."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cachekit.calibration.fileio import header_of, read_tensors, write_tensors
from cachekit.calibration.front import point_from, point_tensors
from cachekit.calibration.identity import Identity

if TYPE_CHECKING:
    from cachekit.calibration.profile import Profile

_FORMAT = "cachekit.profile"
_VERSION = 2
"""1: gram, influence, magnitudes and front. 2: also drifts, noise levels, times and starts."""

_CURVES = ("latent_drift", "sigmas", "seconds")
_BY_BRANCH = ("magnitudes", "drifts")


def write_profile(profile: Profile, path: str | Path) -> Path:
    """Write it atomically; returns the path."""
    tensors = {"gram": profile.gram, "influence": profile.influence}
    for kind in _BY_BRANCH:
        tensors |= {f"{kind}/{branch}": _tensor(curve) for branch, curve in getattr(profile, kind).items()}
    tensors |= {name: _tensor(getattr(profile, name)) for name in _CURVES}
    for point in profile.front:
        tensors |= point_tensors(point)
    header = {"format": _FORMAT, "version": _VERSION, "samples": profile.samples, "notes": list(profile.notes)}
    header |= {"batch": profile.batch, "starts": list(profile.starts), "is_affine": profile.is_affine}
    return write_tensors(path, tensors, {"cachekit": json.dumps(header), "identity": profile.identity.to_json()})


def read_profile(path: str | Path) -> dict[str, Any]:
    """The fields of a profile, from a file of this or an older version.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another kind of file, damaged, or written by a newer version.
    """
    tensors, metadata = read_tensors(path)
    missing, complete = "no profile; make one with cachekit.calibrate", "identity" in metadata
    header = header_of(path, metadata if complete else {}, _FORMAT, _VERSION, missing)
    try:
        return _fields(tensors, metadata, header)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is a damaged profile ({type(error).__name__}: {error}); make it again with cachekit.calibrate"
        ) from None


def _fields(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], header: dict[str, Any]) -> dict[str, Any]:
    counts = sorted({int(name.split("/")[1]) for name in tensors if name.startswith("front/")})
    fields: dict[str, Any] = {
        "identity": Identity.from_json(metadata["identity"]),
        "gram": tensors["gram"],
        "influence": tensors["influence"],
        "front": tuple(point_from(tensors, count) for count in counts),
        "samples": header["samples"],
        "notes": tuple(header["notes"]),
        **{kind: _by_branch(tensors, kind) for kind in _BY_BRANCH},
    }
    if header["version"] >= 2:
        fields |= {name: tuple(tensors[name].tolist()) for name in _CURVES}
        fields |= {"batch": header["batch"], "starts": tuple(header["starts"]), "is_affine": header["is_affine"]}
    steps = fields["identity"].steps
    if fields["gram"].shape != (steps, steps) or fields["influence"].shape != (steps,):
        raise ValueError(f"its matrix is {tuple(fields['gram'].shape)} for {steps} steps")
    return fields


def _by_branch(tensors: Mapping[str, torch.Tensor], kind: str) -> dict[str, tuple[float, ...]]:
    return {
        name.split("/", 1)[1]: tuple(value.tolist()) for name, value in tensors.items() if name.startswith(f"{kind}/")
    }


def _tensor(curve: Any) -> torch.Tensor:
    return torch.tensor(curve, dtype=torch.float64)
