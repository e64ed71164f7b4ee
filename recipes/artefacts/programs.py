"""The three ways to turn a denoiser into a graph that needs none of its Python code: trace, export, compile.

A program takes the tensors of a call in the order of its signature and returns a tuple of tensors.
"""

from __future__ import annotations

import inspect
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from recipes.artefacts.arguments import FlatCall, nested
from recipes.artefacts.errors import ArtefactError

Tensors: TypeAlias = tuple[torch.Tensor, ...]
_ALIGNMENT = 16
"""Bytes; compiled code loads vectors."""
_TRACER_WARNING: type[Warning] = getattr(getattr(torch, "jit", None), "TracerWarning", UserWarning)


class Program(Protocol):
    """A graph that can run and be written."""

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        """Outputs of one call."""
        ...

    def write(self, path: Path) -> None:
        """Write it as torch does."""
        ...


class Plain(nn.Module):
    """A denoiser that takes tensors only and returns a tuple: what tracers understand."""

    def __init__(self, denoiser: nn.Module, call: FlatCall) -> None:
        super().__init__()
        self.denoiser = denoiser
        self._places, self._constants = tuple(call.tensors), call.constants
        self.can_switch = "return_dict" in inspect.signature(type(denoiser).forward).parameters

    def forward(self, *tensors: torch.Tensor) -> Tensors:
        output = self.result(tensors, **({"return_dict": False} if self.can_switch else {}))
        return (output,) if isinstance(output, torch.Tensor) else tuple(output)

    def result(self, tensors: Sequence[torch.Tensor], **more: Any) -> Any:
        """What the denoiser returns by itself."""
        arguments = nested(dict(zip(self._places, tensors, strict=True)), self._constants)
        return self.denoiser(**arguments, **more)


@dataclass(frozen=True)
class Traced:
    """TorchScript: operations as they ran once. Its weights are those of the denoiser until it is saved."""

    script: Any
    suffix = ".pt"

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        return tuple(self.script(*tensors))

    def write(self, path: Path) -> None:
        with _quiet():
            torch.jit.save(self.script, str(path))

    @staticmethod
    def build(plain: Plain, example: Tensors) -> Traced:
        _need(hasattr(torch, "jit") and hasattr(torch.jit, "trace"), "this torch has no torch.jit.trace any more")
        with _quiet():
            return Traced(torch.jit.trace(plain, example, check_trace=False))

    @staticmethod
    def load(path: Path, device: torch.device) -> Traced:
        with _quiet():
            return Traced(torch.jit.load(str(path), map_location=device))


@dataclass(frozen=True)
class Exported:
    """`torch.export`: a graph of ATen operations with a versioned schema, run by torch; needs no compiler."""

    program: Any
    module: Callable[..., Any]
    suffix = ".pt2"

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        return tuple(self.module(*tensors))

    def write(self, path: Path) -> None:
        torch.export.save(self.program, str(path))

    @staticmethod
    def build(plain: Plain, example: Tensors) -> Exported:
        program = torch.export.export(plain, example, strict=False)
        return Exported(program, program.module())

    @staticmethod
    def load(path: Path, device: torch.device) -> Exported:
        program = torch.export.load(str(path))
        return Exported(program, program.module())


@dataclass(frozen=True)
class Compiled:
    """AOTInductor: machine code for one machine, compiled once; loading and running need no compiler.

    The code does not check what it is given, and reads memory as it was laid out at the build.
    """

    path: Path
    runner: Callable[..., Any]
    folder: tempfile.TemporaryDirectory[str] | None = None
    suffix = ".pt2"

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        return tuple(self.runner(*map(_aligned, tensors)))

    def write(self, path: Path) -> None:
        shutil.copyfile(self.path, path)

    @staticmethod
    def build(plain: Plain, example: Tensors) -> Compiled:
        _need(can_compile(), "there is no C++ compiler")
        program = torch.export.export(plain, example, strict=False)
        folder = tempfile.TemporaryDirectory(prefix="artefact-")
        path = Path(folder.name) / "model.pt2"
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        return Compiled(path, torch._inductor.aoti_load_package(str(path)), folder)

    @staticmethod
    def load(path: Path, device: torch.device) -> Compiled:
        index = -1 if device.index is None else device.index
        return Compiled(path, torch._inductor.aoti_load_package(str(path), device_index=index))


KINDS: dict[str, type[Traced] | type[Exported] | type[Compiled]] = {
    "aot": Compiled,
    "trace": Traced,
    "export": Exported,
}


def can_compile() -> bool:
    """Whether AOTInductor finds a C++ compiler; it needs one on every device."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        return shutil.which(get_cpp_compiler()) is not None
    except Exception:
        return False


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


def _need(condition: bool, problem: str) -> None:
    if not condition:
        raise ArtefactError(f"{problem}; pass kind='export', which needs neither")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what TorchScript says about itself: that it is deprecated, and that shapes are baked in.

    Neither helps here: other shapes are refused, and a build is compared with the denoiser.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=_TRACER_WARNING)
        yield
