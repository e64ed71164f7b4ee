"""The calls that a pipeline makes to its denoiser: what an artefact is built from."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import cachekit as ck
import offload
from cachekit.engine.discovery import find_denoisers
from cachekit.engine.hooks import is_compiled
from recipes.artefacts.arguments import FlatCall, difference, flat_call
from recipes.artefacts.errors import ArtefactError


def the_denoiser(pipe: Any, component: str | None) -> tuple[str, nn.Module]:
    """Name and module of the denoiser to build from.

    Raises:
        ArtefactError: there is none, there are several, or something is enabled on it that a graph would miss.
    """
    found = find_denoisers(pipe)
    names = ", ".join(found) or "none"
    if component is None and len(found) != 1:
        raise ArtefactError(f"the pipeline has these denoisers: {names}; pass component= to say which")
    name = component if component is not None else next(iter(found))
    if name not in found:
        raise ArtefactError(f"the pipeline has no denoiser called {name!r}; it has {names}")
    module = found[name]
    _check_plain(pipe, name, module)
    return name, module


def record(pipe: Any, name: str, module: nn.Module, call: dict[str, Any]) -> list[FlatCall]:
    """Run the pipeline for two steps, unless `call` says otherwise, and keep the first and the last denoiser call.

    Raises:
        ArtefactError: the denoiser is not called, or in several ways.
    """
    calls: list[FlatCall] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        flat = flat_call(module, args, kwargs)
        if calls:
            other = difference(calls[0].signature(), flat.signature())
            if other:
                raise ArtefactError(
                    f"the calls of {name} within one run differ ({other}); build one artefact for each of them"
                )
        kept = {place: tensor.detach().clone() for place, tensor in flat.tensors.items()}
        calls[1:] = [FlatCall(kept, flat.constants)]

    defaults: dict[str, Any] = {
        "num_inference_steps": 2,
        "output_type": "latent",
        "generator": torch.Generator().manual_seed(0),
    }
    hook = module.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        pipe(**(defaults | call))
    finally:
        hook.remove()
    if not calls:
        raise ArtefactError(f"the pipeline did not call {name}; pass what you draw with, such as prompt=...")
    return calls


def _check_plain(pipe: Any, name: str, module: nn.Module) -> None:
    if ck.is_cache_enabled(module):
        raise ArtefactError(
            f"a cache is enabled on {name}, and a graph would hold its decisions of one step for good; call "
            "cachekit.disable_cache(pipe) first"
        )
    if offload.active(pipe) is not None or hasattr(module, "_hf_hook"):
        raise ArtefactError(
            f"{name} is offloaded, and a graph holds its weights in one place; call offload.disable(pipe) or "
            "pipe.remove_all_hooks() first"
        )
    if hasattr(module, "_orig_mod") or any(is_compiled(part) for part in module.modules()):
        raise ArtefactError(f"{name} is compiled already; build the artefact from the model as it was loaded")
    if module.training:
        raise ArtefactError(f"{name} is in training mode; call pipe.{name}.eval() first")
    places = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(places) != 1 or next(iter(places)).type == "meta":
        raise ArtefactError(
            f"the weights of {name} are on {sorted(map(str, places))}; move all of it to one device with pipe.to(...)"
        )
