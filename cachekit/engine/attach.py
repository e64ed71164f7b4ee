"""From the spec of a site to hooks on a denoiser."""

from __future__ import annotations

from collections.abc import Iterable
from functools import singledispatch
from typing import Any

from torch import nn

from cachekit.engine.denoiser_site import DenoiserSite
from cachekit.engine.discovery import find_block_lists, find_unet, latent_names, unwrap
from cachekit.engine.modules_site import ModulesSite
from cachekit.engine.rules import DenoiserSpec, ModulesSpec, StackSpec
from cachekit.engine.sites import Site
from cachekit.engine.stack import StackSite
from cachekit.errors import UnsupportedModelError


@singledispatch
def attach(spec: Any, denoiser: nn.Module) -> Site:
    """Hook the places that `spec` names in a denoiser.

    Raises:
        UnsupportedModelError: there is no such place, or hooks there would never run.
    """
    raise TypeError(f"no site for {type(spec).__name__}")


@attach.register
def _(spec: DenoiserSpec, denoiser: nn.Module) -> Site:
    return DenoiserSite()


@attach.register
def _(spec: ModulesSpec, denoiser: nn.Module) -> Site:
    refuse_whole_compile(denoiser)
    refuse_compiled_parents(denoiser, (*spec.modules, *spec.zeroed))
    return ModulesSite(spec, denoiser)


@attach.register
def _(spec: StackSpec, denoiser: nn.Module) -> Site:
    refuse_whole_compile(denoiser)
    if not latent_names(denoiser):
        raise UnsupportedModelError(
            f"{type(denoiser).__name__}.forward names no argument for the latents; give it a parameter hidden_states"
        )
    unet = find_unet(denoiser)
    if unet is not None:
        return StackSite(spec, unet.lists(), unet)
    lists = find_block_lists(denoiser)
    if sum(len(item.blocks) for item in lists) < 2:
        raise UnsupportedModelError(
            f"{type(denoiser).__name__} has no list of at least two blocks to skip; keep the blocks of your model in "
            f"an nn.ModuleList and call them one after the other"
        )
    return StackSite(spec, lists)


def refuse_whole_compile(denoiser: nn.Module) -> None:
    """A denoiser that is compiled as a whole runs no hooks inside."""
    core = unwrap(denoiser)
    if core is not denoiser or core._compiled_call_impl is not None:
        raise UnsupportedModelError(
            f"{type(core).__name__} is compiled as a whole, so its blocks can no longer be skipped; "
            f"compile its blocks instead: model.compile_repeated_blocks()"
        )


def refuse_compiled_parents(denoiser: nn.Module, paths: Iterable[str]) -> None:
    """Hooks on modules inside a compiled module never run."""
    inner = tuple(paths)
    for path, parent in denoiser.named_modules():
        if parent._compiled_call_impl is None:
            continue
        if not path or any(name.startswith(f"{path}.") for name in inner):
            raise UnsupportedModelError(
                f"{path or type(denoiser).__name__} is compiled, so hooks on modules inside it never run; predict "
                f"the block stack instead (use_lite_mode=True), or enable the cache without compiling"
            )
