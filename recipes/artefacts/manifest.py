"""What an artefact's file says about itself, readable without running anything that is inside.

torch writes its graphs as zip archives; the manifest is one more entry of that archive.
"""

from __future__ import annotations

import platform
import zipfile
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from recipes.artefacts.arguments import Signature
from recipes.artefacts.errors import ArtefactError

Kind = Literal["trace", "export", "aot"]
_ENTRY = "extra/cachekit.json"
_EXTENSIONS = ("avx", "amx", "sse", "ssse", "fma", "f16c", "bmi", "vaes", "gfni", "sve", "asimd", "bf16", "i8mm")


class Machine(BaseModel):
    """What the machine code of a compiled artefact needs."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    architecture: str
    accelerator: str = ""
    extensions: tuple[str, ...] = ()

    def lacks(self, other: Machine) -> str | None:
        """What `other` needs and this machine has not."""
        if self.architecture != other.architecture:
            return f"a processor of the architecture {other.architecture}"
        if self.accelerator != other.accelerator:
            return f"the accelerator {other.accelerator}" if other.accelerator else "no accelerator"
        missing = sorted(set(other.extensions) - set(self.extensions))
        return f"a processor with {', '.join(missing)}" if missing else None


class Manifest(BaseModel):
    """What an artefact is and where it can run.

    Attributes:
        format: version of this description.
        kind: "trace" (TorchScript), "export" (`torch.export`) or "aot" (AOTInductor).
        component: name of the pipeline's component, "unet".
        denoiser: class of the denoiser; its name in diffusers.
        config: the denoiser's config.
        weights: fingerprint of the weights inside.
        output: class of the result with `return_dict=True`; "" for a plain tuple.
        signature: the calls that it serves.
        device: where it runs, "cpu" or "cuda:0".
        dtype: of the denoiser's weights.
        torch, diffusers: versions that it was built with.
        machine: what compiled code needs; None for the other kinds.
        agreement: PSNR in dB between its output and the denoiser's when it was built; None when bit-identical.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal[1] = 1
    kind: Kind
    component: str
    denoiser: str
    config: dict[str, Any]
    weights: str
    output: str
    signature: Signature
    device: str
    dtype: str
    torch: str
    diffusers: str
    machine: Machine | None = None
    agreement: float | None = None

    def __str__(self) -> str:
        inputs = ", ".join(map(str, self.signature.tensors))
        return f"{self.denoiser} by {self.kind} for {self.device}, torch {self.torch}: {inputs}"


def versions() -> dict[str, str]:
    """Of the installed libraries."""
    return {"torch": torch.__version__.partition("+")[0], "diffusers": diffusers.__version__}


def this_machine(device: torch.device) -> Machine:
    """The machine that this process runs on, as far as compiled code depends on it."""
    accelerator = ""
    if device.type == "cuda":
        accelerator = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    return Machine(architecture=platform.machine(), accelerator=accelerator, extensions=_extensions())


def _extensions() -> tuple[str, ...]:
    """Extensions of the processor's instructions that compilers use; empty where the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    found = {word for line in lines if line.startswith(("flags", "Features")) for word in line.split(":", 1)[1].split()}
    return tuple(sorted(word for word in found if word.startswith(_EXTENSIONS)))


def stamp(path: Path, manifest: Manifest) -> None:
    """Add the manifest to an archive that torch wrote."""
    with zipfile.ZipFile(path, "a") as archive:
        folder = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{folder}/{_ENTRY}", manifest.model_dump_json(indent=1))


def read(path: Path) -> Manifest:
    """The manifest of a file; runs nothing of what is inside.

    Raises:
        ArtefactError: the file is missing, damaged, or no artefact.
    """
    if not path.is_file():
        raise ArtefactError(f"there is no file {path}; build the artefact with recipes.artefacts.build(...).save(path)")
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(f"/{_ENTRY}")]
            text = archive.read(names[-1])
    except (zipfile.BadZipFile, IndexError, OSError) as error:
        raise ArtefactError(
            f"{path} is no artefact of recipes.artefacts, or it is damaged ({error}); build it again and save it"
        ) from error
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ArtefactError(
            f"the description in {path} cannot be read ({where}: {first['msg']}); it was written by another version "
            "of this package: build the artefact again"
        ) from error


def check_here(manifest: Manifest, name: str) -> None:
    """Refuse an artefact that was not made for this torch, this device or this machine.

    Raises:
        ArtefactError: with what differs and what to do.
    """
    built, installed = manifest.torch, versions()["torch"]
    if _minor(built) != _minor(installed):
        raise ArtefactError(
            f"{name} was built with torch {built}, this is torch {installed}: graphs are not carried over between "
            f"minor versions. Build it again with recipes.artefacts.build, or install torch {_minor(built)}"
        )
    if manifest.kind == "aot" and built != installed:
        raise ArtefactError(
            f"{name} holds code compiled against torch {built}, this is torch {installed}; build it again, or install "
            f"torch {built}"
        )
    device = torch.device(manifest.device)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ArtefactError(f"{name} was built for {device}, which is not here; build it on this machine") from error
    if manifest.machine is not None:
        lacking = this_machine(device).lacks(manifest.machine)
        if lacking:
            raise ArtefactError(f"{name} holds machine code that needs {lacking}; build it on this machine")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
