"""An artefact in memory: a program and its manifest; building, saving and loading it."""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipes.artefacts import manifest as manifests
from recipes.artefacts.arguments import FlatCall, dtype_name
from recipes.artefacts.capture import record, the_denoiser
from recipes.artefacts.errors import ArtefactError
from recipes.artefacts.manifest import Manifest
from recipes.artefacts.programs import KINDS, Plain, Program, Tensors, can_compile
from recipes.artefacts.weights import fingerprint

_AGREEMENT = {torch.float32: 60.0, torch.float64: 60.0}
_AGREEMENT_HALF = 40.0
"""PSNR in dB that a program must reach against the denoiser; rounding of half precision costs the rest."""


@dataclass(frozen=True)
class Artefact:
    """A denoiser as a graph for one size of inputs.

    Attributes:
        manifest: what it is and where it runs.
        program: the graph.
        origin: file that it was loaded from, or None.
    """

    manifest: Manifest
    program: Program
    origin: Path | None = None

    def __repr__(self) -> str:
        return f"<Artefact: {self.manifest}>"

    @property
    def name(self) -> str:
        """For messages."""
        return str(self.origin) if self.origin is not None else f"the artefact of {self.manifest.component}"

    def __call__(self, call: FlatCall) -> Tensors:
        """Run the graph on a call that fits `manifest.signature`; tensors are moved to its device."""
        device = torch.device(self.manifest.device)
        places = [item.place for item in self.manifest.signature.tensors]
        with torch.no_grad():
            return tuple(self.program([call.tensors[place].to(device).contiguous() for place in places]))

    def warm_up(self, calls: int = 2) -> None:
        """Run it on zeros: TorchScript optimises during the first two calls, a GPU loads its kernels."""
        tensors = {
            item.place: torch.zeros(item.shape, dtype=getattr(torch, item.dtype), device=self.manifest.device)
            for item in self.manifest.signature.tensors
        }
        for _ in range(calls):
            self(FlatCall(tensors, {}))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the artefact as one file, replacing an older one at once or not at all.

        Args:
            path: ends in ".pt" for a trace, in ".pt2" for the other kinds.

        Raises:
            ArtefactError: another ending, or the folder does not exist.
        """
        target = Path(path)
        suffix = KINDS[self.manifest.kind].suffix
        if target.suffix != suffix:
            raise ArtefactError(f"a file of the kind {self.manifest.kind!r} ends in {suffix!r}, got {target.name!r}")
        if not target.parent.is_dir():
            raise ArtefactError(f"cannot write {target}: the folder {target.parent} does not exist; make it first")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
            temporary = Path(folder) / target.name
            self.program.write(temporary)
            manifests.stamp(temporary, self.manifest)
            os.replace(temporary, target)
        return target


def build(pipe: Any, kind: str | None = None, *, component: str | None = None, **call: Any) -> Artefact:
    """Turn a pipeline's denoiser into an artefact; the pipeline stays as it is.

    The pipeline draws for two steps to see what its denoiser is called with, so pass what you will call it with:
    size, batch, guidance. The artefact serves exactly such calls and is compared with the denoiser on both of them.

    Args:
        pipe: a diffusers pipeline, with its weights on the device where the artefact shall run.
        kind: "aot" (compiled by AOTInductor), "trace" (`torch.jit.trace`) or "export" (`torch.export`); left out,
            "aot" where there is a C++ compiler, else "trace".
        component: which denoiser, of several.
        **call: arguments of the pipeline.

    Raises:
        ArtefactError: something is enabled on the denoiser, its calls differ within the run, it cannot be turned into
            a graph in this way, or the graph gives other results.
    """
    chosen = kind or ("aot" if can_compile() else "trace")
    if chosen not in KINDS:
        raise ArtefactError(f"there is no kind {kind!r}; the kinds are {', '.join(KINDS)}")
    name, module = the_denoiser(pipe, component)
    with torch.no_grad():
        calls = record(pipe, name, module, call)
        plain = Plain(module, calls[0])
        program = _program(chosen, plain, tuple(calls[0].tensors.values()))
        agreement = _agreement(chosen, plain, program, calls)
        output = type(plain.result(tuple(calls[0].tensors.values())))
    weight, installed = next(module.parameters()), manifests.versions()
    described = Manifest(
        kind=chosen,  # type: ignore[arg-type]
        component=name,
        denoiser=type(module).__name__,
        config=_json(getattr(module, "config", {})),
        weights=fingerprint(module),
        output="" if output in (tuple, torch.Tensor) else f"{output.__module__}.{output.__qualname__}",
        signature=calls[0].signature(),
        device=str(weight.device),
        dtype=dtype_name(getattr(module, "dtype", weight.dtype)),
        machine=manifests.this_machine(weight.device) if chosen == "aot" else None,
        agreement=None if math.isinf(agreement) else agreement,
        torch=installed["torch"],
        diffusers=installed["diffusers"],
    )
    return Artefact(described, program)


def load(path: str | os.PathLike[str]) -> Artefact:
    """Read an artefact for this machine.

    An artefact is code: load only files that you or people you trust have built. `describe` runs nothing.

    Raises:
        ArtefactError: the file is missing, damaged, no artefact, or made for another torch, device or machine.
    """
    file = Path(path)
    found = manifests.read(file)
    manifests.check_here(found, str(file))
    try:
        program = KINDS[found.kind].load(file, torch.device(found.device))
    except Exception as error:
        raise ArtefactError(f"{file} cannot be loaded ({error}); it may be damaged: build it again") from error
    return Artefact(found, program, file)


def describe(path: str | os.PathLike[str]) -> Manifest:
    """What a file says about itself, without running anything that is inside.

    Raises:
        ArtefactError: the file is missing, damaged, or no artefact.
    """
    return manifests.read(Path(path))


def _program(kind: str, plain: Plain, example: Tensors) -> Program:
    try:
        return KINDS[kind].build(plain, tuple(tensor.contiguous() for tensor in example))
    except ArtefactError:
        raise
    except Exception as error:
        others = " or ".join(repr(other) for other in KINDS if other != kind)
        raise ArtefactError(
            f"{type(plain.denoiser).__name__} cannot be turned into a graph by {kind!r}: "
            f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}. Try kind={others}, or torch.compile"
        ) from error


def _agreement(kind: str, plain: Plain, program: Program, calls: list[FlatCall]) -> float:
    """The lower PSNR of the recorded calls, relative to the range of the denoiser's output."""
    worst = math.inf
    for call in calls:
        tensors = tuple(tensor.contiguous() for tensor in call.tensors.values())
        wanted, given = plain(*tensors), program(tensors)
        if len(wanted) != len(given):
            raise ArtefactError(f"the graph returns {len(given)} tensors, the denoiser {len(wanted)}")
        worst = min(worst, *(_psnr(a.double(), b.double()) for a, b in zip(wanted, given, strict=True)))
        limit = _AGREEMENT.get(wanted[0].dtype, _AGREEMENT_HALF)
        if not worst >= limit:
            raise ArtefactError(
                f"the graph made by {kind!r} gives other results than the denoiser ({worst:.1f} dB, {limit:.0f} dB "
                "wanted): the model decides something in Python from its inputs. Use another kind, or torch.compile"
            )
    return worst


def _psnr(wanted: torch.Tensor, given: torch.Tensor) -> float:
    if wanted.shape != given.shape:
        return -math.inf
    error = float((wanted - given).square().mean())
    extent = float(wanted.max() - wanted.min())
    if error == 0:
        return math.inf
    return 10 * math.log10(extent**2 / error) if extent > 0 else -math.inf


def _json(config: Any) -> dict[str, Any]:
    """A config as JSON keeps it."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(config), default=str))
    return {key: value for key, value in plain.items() if not key.startswith("_")}


def config_of(module: nn.Module) -> dict[str, Any]:
    """The part of a denoiser's config that an artefact must share, as its manifest keeps it."""
    return _json(getattr(module, "config", {}))
