"""From the spec of a site to hooks on a denoiser."""

from __future__ import annotations

from collections.abc import Iterable
from functools import singledispatch
from typing import Any

from torch import nn

from cachekit.engine.binding import parameter_names
from cachekit.engine.denoiser_site import DenoiserSite
from cachekit.engine.discovery import (
    find_attention,
    find_block_lists,
    find_unet,
    latent_names,
    timestep_names,
    unwrap,
)
from cachekit.engine.guidance_site import GuidanceSite
from cachekit.engine.hooks import compiled_parent, is_compiled
from cachekit.engine.modules_site import ModulesSite
from cachekit.engine.rules import DenoiserSpec, GuidanceSpec, ModulesSpec, StackSpec, TextSpec
from cachekit.engine.sites import Site
from cachekit.engine.stack import StackSite
from cachekit.engine.text_site import TextSite, inside_attention
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
def _(spec: TextSpec, denoiser: nn.Module) -> Site:
    if not find_attention(denoiser):
        raise UnsupportedModelError(
            f"{type(denoiser).__name__} has no attention module that projects queries, so it has no keys and values of "
            f"the text to keep; use a cache that skips blocks"
        )
    own = {*latent_names(denoiser), *timestep_names(denoiser), "return_dict"}
    if not set(parameter_names(type(denoiser))) - own:
        raise UnsupportedModelError(
            f"{type(denoiser).__name__} takes nothing but latents and a timestep, so it has no text to keep anything "
            f"of; use a cache that skips blocks"
        )
    refuse_compiled_parents(denoiser, inside_attention(denoiser))
    return TextSite(spec, denoiser)


@attach.register
def _(spec: GuidanceSpec, denoiser: nn.Module) -> Site:
    return GuidanceSite(latent_names(denoiser))


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
    if core is not denoiser or is_compiled(core):
        raise UnsupportedModelError(
            f"{type(core).__name__} is compiled as a whole, so its blocks can no longer be skipped; "
            f"compile its blocks instead: model.compile_repeated_blocks()"
        )


def refuse_compiled_parents(denoiser: nn.Module, paths: Iterable[str]) -> None:
    """Hooks on modules inside a compiled module never run."""
    parent = compiled_parent(denoiser, paths)
    if parent is not None:
        raise UnsupportedModelError(
            f"{parent or type(denoiser).__name__} is compiled, so hooks on modules inside it never run; use a cache on "
            f"the block stack instead (TaylorSeer: use_lite_mode=True), or enable this one without compiling"
        )
