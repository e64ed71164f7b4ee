"""The mode "model", which is diffusers' own, made reversible, with its bytes counted; and what "sequential" shares."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from cachekit.engine.discovery import find_denoisers
from cachekit.engine.hooks import Hook, Inner
from cachekit.engine.traffic import count_moved
from offload.errors import OffloadError, warn
from offload.handle import ComponentStats, Undo, modules_of, total_bytes
from offload.layout import returned, shift_of
from offload.standins import ADDING, watch

DEPTH = -1
"""Inside of every cache's hook: what a cache answers moves no weights."""


class NoOptions(BaseModel):
    """The modes "model" and "sequential" have no options."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Hooked:
    """diffusers' hooks on the components of a pipeline."""

    buffer_bytes = 0
    extra_buffers = 0

    def __init__(self, pipe: Any) -> None:
        self.undo = Undo()
        self._names = {name: weakref.ref(module) for name, module in modules_of(pipe).items()}
        self._moved = dict.fromkeys(self._names, 0)
        self._moves = dict.fromkeys(self._names, 0)

    def moved(self, name: str, module: nn.Module, nbytes: int) -> None:
        """Weights of a component are about to be moved to the execution device."""
        self._moved[name] += nbytes
        self._moves[name] += 1
        count_moved(module, nbytes)

    def components(self) -> dict[str, ComponentStats]:
        alive = {name: module for name, reference in self._names.items() if (module := reference()) is not None}
        return {
            name: ComponentStats(total_bytes(module), 0, self._moved[name], self._moves[name])
            for name, module in alive.items()
        }

    def remove(self) -> None:
        self.undo.run()


def offload_models(pipe: Any, device: torch.device, options: NoOptions) -> Hooked:
    """Whole components in the order of `model_cpu_offload_seq`; the denoiser stays during the loop."""
    work = prepared(pipe)
    try:
        if getattr(pipe, "model_cpu_offload_seq", None) is None:
            pipe.model_cpu_offload_seq = derived_order(pipe)
        pipe.enable_model_cpu_offload(device=device)
        for name, module in modules_of(pipe).items():
            work.undo.add(Hook(module, _counting_component(work, name, module, device), depth=DEPTH).remove)
            work.undo.add(watch(module, ADDING, nullcontext).run)
    except BaseException:
        work.remove()
        raise
    return work


def derived_order(pipe: Any) -> str:
    """The order in which components run, for pipelines that name none: encoders, denoisers, decoders.

    Raises:
        OffloadError: there is no denoiser, so that the order cannot be told.
    """
    modules = modules_of(pipe)
    denoisers = [name for name in find_denoisers(pipe) if name in modules]
    if not denoisers:
        raise OffloadError(
            f"{type(pipe).__name__} names no model_cpu_offload_seq and has no denoiser to derive one from; set "
            f"pipe.model_cpu_offload_seq = 'first->second->...' in the order in which its components run, or use the "
            f"mode 'group'"
        )
    others = [name for name in modules if name not in denoisers]
    last = [name for name in others if name.startswith(("vae", "vqvae", "vqgan", "decoder", "vocoder", "movq"))]
    first = [name for name in others if name not in last]
    return "->".join([*first, *denoisers, *last])


def prepared(pipe: Any) -> Hooked:
    """Note how everything is, and how to get back there."""
    work = Hooked(pipe)
    missing = object()
    names = ("_all_hooks", "_offload_device", "_offload_gpu_id", "model_cpu_offload_seq")
    before = {name: pipe.__dict__.get(name, missing) for name in names}
    owner = weakref.ref(pipe)

    def forget_attributes() -> None:
        pipeline = owner()
        for name, value in before.items() if pipeline is not None else ():
            if value is missing:
                pipeline.__dict__.pop(name, None)
            else:
                pipeline.__dict__[name] = value

    def take_hooks_off() -> None:
        pipeline = owner()
        if pipeline is not None:
            pipeline.remove_all_hooks()

    work.undo.add(forget_attributes)
    for module in modules_of(pipe).values():
        work.undo.add(_homes(module))
        work.undo.add(_ties(module))
        work.undo.add(_forwards(module))
    work.undo.add(take_hooks_off)
    return work


def _homes(module: nn.Module) -> Callable[[], None]:
    """Remember where every tensor is; the result moves what is elsewhere back."""
    reference = weakref.ref(module)
    homes = {name: (tensor.device, shift_of(tensor)) for name, tensor in _named(module)}

    def back() -> None:
        owner = reference()
        for name, tensor in _named(owner) if owner is not None else ():
            home, shift = homes.get(name, (tensor.device, shift_of(tensor)))
            if (tensor.device, shift_of(tensor)) != (home, shift):
                tensor.data = returned(tensor.data, home, shift)

    return back


def _ties(module: nn.Module) -> Callable[[], None]:
    """Remember which names share one parameter; the result ties them again."""
    reference = weakref.ref(module)
    shared: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    tied = [names for names in shared.values() if len(names) > 1]

    def again() -> None:
        owner = reference()
        if owner is None:
            return
        for names in tied:
            first = owner.get_parameter(names[0])
            for name in names[1:]:
                path, _, leaf = name.rpartition(".")
                owner.get_submodule(path)._parameters[leaf] = first

    return again


def _forwards(module: nn.Module) -> Callable[[], None]:
    """Remember which modules have a `forward` of their own; accelerate leaves the class's behind as one."""
    reference = weakref.ref(module)
    own = weakref.WeakSet(inner for inner in module.modules() if "forward" in inner.__dict__)

    def back() -> None:
        owner = reference()
        for inner in owner.modules() if owner is not None else ():
            if inner not in own:
                inner.__dict__.pop("forward", None)

    return back


def _named(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _counting_component(work: Hooked, name: str, module: nn.Module, device: torch.device) -> Callable[..., Any]:
    reference = weakref.ref(module)

    def handler(inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner = reference()
        assert owner is not None
        away = sum(tensor.nbytes for _, tensor in _named(owner) if tensor.device.type != device.type)
        if away:
            work.moved(name, owner, away)
        return inner(*args, **kwargs)

    return handler


def release_foreign_hooks(pipe: Any) -> None:
    """Take off what others put on: a device map, accelerate's hooks. diffusers' group offload is refused.

    Raises:
        OffloadError: diffusers' group offload is active.
    """
    if isinstance(pipe, nn.Module):
        return
    for name, module in modules_of(pipe).items():
        for inner in module.modules():
            registry = getattr(inner, "_diffusers_hook", None)
            if registry is not None and registry.get_hook("group_offloading") is not None:
                raise OffloadError(
                    f"diffusers' group offload is active on `{name}`; load the pipeline again without "
                    f"enable_group_offload, then call offload.enable"
                )
    if getattr(pipe, "hf_device_map", None) is not None:
        warn("the pipeline's device map was reset: offloading decides where its components are")
        pipe.reset_device_map()
    if any(hasattr(module, "_hf_hook") for module in modules_of(pipe).values()):
        warn("the pipeline's own offloading was switched off: offload.enable takes its place")
        pipe.remove_all_hooks()
