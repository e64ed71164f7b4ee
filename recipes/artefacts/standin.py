"""The module that stands in a pipeline for its denoiser and runs artefacts."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import diffusers
import torch
from diffusers.utils import BaseOutput
from torch import nn

from recipes.artefacts.arguments import FlatCall, difference, flat_call
from recipes.artefacts.artefact import Artefact
from recipes.artefacts.errors import ArtefactError, FixedModelError
from recipes.artefacts.warning import warn

_CURE = "undo the artefact first, change the model, and build it again"


class FixedDenoiser(nn.Module):
    """Answers calls with the artefact that was built for such inputs; otherwise with the denoiser itself, or refuses.

    To a pipeline it looks like the denoiser: `config`, `dtype`, `device`, the config's values as attributes, and
    the attributes of single modules inside, read from a copy without weights. It has no blocks and no weights of its
    own, cannot be moved or cast, and whatever would change the model is refused.

    Args:
        artefacts: one for each kind of call.
        outline: a module of the same class and config, without weights where possible.
        fallback: the denoiser, to run other calls on.
    """

    def __init__(self, artefacts: Sequence[Artefact], outline: nn.Module, fallback: nn.Module | None) -> None:
        super().__init__()
        # Past torch's registration: these are no parts of the module, or `.to()` would reach them.
        self.__dict__.update(_artefacts=tuple(artefacts), _outline=outline, _fallback=fallback, _said=set())
        self._output = _output_class(artefacts[0].manifest.output)
        self.training = False

    @property
    def artefacts(self) -> tuple[Artefact, ...]:
        """In the order in which they are asked."""
        return tuple(self.__dict__["_artefacts"])

    @property
    def device(self) -> torch.device:
        return torch.device(self.artefacts[0].manifest.device)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.artefacts[0].manifest.dtype)  # type: ignore[no-any-return]

    @property
    def config(self) -> Any:
        return self.__dict__["_outline"].config

    def cache_context(self, name: str) -> AbstractContextManager[None]:
        """Pipelines name their branches with it; an artefact has no use for the name."""
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        outline = self.__dict__.get("_outline")
        if outline is None or name.startswith("__"):
            raise AttributeError(name)
        config = getattr(outline, "config", {})
        if name in config:
            return config[name]
        try:
            value = getattr(outline, name)
        except AttributeError:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}") from None
        if inspect.ismethod(value):
            raise FixedModelError(f"{name}() is not for an artefact, whose graph and weights are fixed; {_CURE}")
        if isinstance(value, nn.ModuleList):
            raise FixedModelError(f"an artefact has no {name} that something could be done to; {_CURE}")
        return value

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FixedDenoiser:
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if (probe.device, probe.dtype) != (self.device, self.dtype):
            raise ArtefactError(
                f"{self.artefacts[0].name} was built for {self.device} and {self.dtype} and cannot be moved to "
                f"{probe.device} and {probe.dtype}; {_CURE} there"
            )
        return self

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call, with the arguments of the denoiser's `forward`."""
        call = flat_call(self, args, kwargs)
        given = call.signature()
        reasons = []
        for artefact in self.artefacts:
            reason = difference(artefact.manifest.signature, given)
            if reason is None:
                return self._result(artefact(call), call, kwargs)
            reasons.append(reason)
        message = f"{self.artefacts[0].name} does not fit this call of {self.artefacts[0].manifest.component}: "
        message += "; ".join(dict.fromkeys(reasons))
        if self.__dict__["_fallback"] is None:
            raise ArtefactError(
                f"{message}. Call the pipeline as at the build (size, batch, guidance, sampler), install another "
                "artefact beside this one, or install with fallback=True to run such calls on the denoiser"
            )
        if given not in self.__dict__["_said"]:
            self.__dict__["_said"].add(given)
            warn(f"{message}. Such calls run on the denoiser itself; build an artefact for them too to make them fast")
        return self.__dict__["_fallback"](*args, **kwargs)

    def _result(self, outputs: tuple[torch.Tensor, ...], call: FlatCall, kwargs: dict[str, Any]) -> Any:
        if self._output is None or not kwargs.get("return_dict", True):
            return outputs
        return self._output(*outputs)


def standin(artefacts: Sequence[Artefact], original: nn.Module | None, fallback: bool) -> FixedDenoiser:
    """A module for `pipe.<component>`; its `forward` has the signature of the denoiser's.

    Raises:
        ArtefactError: the denoiser is no class of diffusers and not there to be copied.
    """
    first = artefacts[0].manifest
    outline = _outline(first.denoiser, first.config, original)

    def forward(self: FixedDenoiser, *args: Any, **kwargs: Any) -> Any:
        return self.run(args, kwargs)

    forward.__signature__ = inspect.signature(type(outline).forward)  # type: ignore[attr-defined]
    made = type(f"Fixed{first.denoiser}", (FixedDenoiser,), {"forward": forward, "__module__": __name__})
    result: FixedDenoiser = made(artefacts, outline, original if fallback else None)
    return result


def _outline(name: str, config: dict[str, Any], original: nn.Module | None) -> nn.Module:
    """The denoiser without weights; the denoiser itself where it cannot be made from a config."""
    kind = type(original) if original is not None else getattr(diffusers, name, None)
    if kind is None or not hasattr(kind, "from_config"):
        if original is None:
            raise ArtefactError(
                f"{name} is no model of diffusers; give the pipeline its own denoiser before installing the artefact"
            )
        return original
    given: Any = config if original is None else original.config
    with torch.device("meta"):
        made: nn.Module = kind.from_config(given)
    return made.eval()


def _output_class(name: str) -> type[Any] | None:
    """The class of a result by its full name; only result classes of diffusers are looked up."""
    if not name:
        return None
    home, _, label = name.rpartition(".")
    found = getattr(importlib.import_module(home), label, None) if home.startswith("diffusers.") else None
    if not (inspect.isclass(found) and issubclass(found, BaseOutput)):
        raise ArtefactError(f"{name} is no result class of diffusers {diffusers.__version__}; build the artefact again")
    return found
