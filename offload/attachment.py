"""What is put on the modules of a component while its weights are streamed, and taken off again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from cachekit.engine import observers
from cachekit.engine.binding import replace_tensors, tensors_in
from cachekit.engine.hooks import Hook, Inner, is_compiled
from offload.errors import OffloadError, warn
from offload.layout import Group
from offload.slots import Slot
from offload.sources import loaded
from offload.standins import FUSING, Uncopyable, watch
from offload.streamer import Route, Streamer

_DEPTH = -1
"""Inside of every cache's hook: what a cache answers moves no weights."""


class Attachment:
    """The hooks of one component. A module inside a group that is called by itself brings the group's weights too."""

    def __init__(self, name: str, route: Route, streamer: Streamer) -> None:
        self._name, self._route, self._streamer = name, route, streamer
        self._hooks: list[Hook] = []
        self._removers: list[Callable[[], None]] = []
        component = route.component
        try:
            for group in route.groups:
                self._attach(group)
            self._refuse(component)
            self._removers.append(watch(component, FUSING, _refuse_fusing).run)
            observers.acquire(self)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take everything off."""
        observers.release(self)
        for hook in self._hooks:
            hook.remove()
        for remove in self._removers:
            remove()
        self._hooks.clear()
        self._removers.clear()

    def compiled(self, module: nn.Module) -> None:
        """`module.compile()` was called somewhere in the process; take the place in front of it again."""
        for hook in self._hooks:
            hook.ensure()
        if module is self._route.component:
            warn(
                f"`{self._name}` was compiled as a whole while its weights are offloaded, which breaks its graph at "
                f"every block; compile the blocks instead: model.compile_repeated_blocks()"
            )

    def _attach(self, group: Group) -> None:
        route, streamer = self._route, self._streamer
        module = group.module
        owners = {name.rpartition(".")[0] for name in (entry.name for entry in group.entries)}

        def outer(inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            _refuse_gradients(group, args, kwargs)
            slot = streamer.enter(route, group)
            try:
                streamer.look_ahead(route, group)
                return _own_memory(inner(*args, **kwargs), slot)
            finally:
                streamer.leave(group, slot)

        def inside(inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return inner(*args, **kwargs) if streamer.is_held(group) else outer(inner, args, kwargs)

        self._hooks.append(Hook(module, outer, depth=_DEPTH))
        for path in sorted(owners - {group.name}):
            owner = route.component.get_submodule(path)
            if type(owner).forward is not nn.Module.forward:
                self._hooks.append(Hook(owner, inside, depth=_DEPTH))
        self._removers.append(module._register_state_dict_hook(_Saving(group, streamer)).remove)
        self._removers.append(module.register_load_state_dict_pre_hook(_Loading(group)).remove)
        self._refuse(module)

    def _refuse(self, module: nn.Module) -> None:
        """Let conversions, copies and pickles of a module fail with a message."""
        refusal = Refusal(
            module, [entry.dtype for group in self._route.groups for entry in group.entries], self._streamer.device
        )
        module.__dict__["_apply"] = refusal
        reference = weakref.ref(module)

        def undo() -> None:
            owner = reference()
            if owner is not None and owner.__dict__.get("_apply") is refusal:
                del owner.__dict__["_apply"]

        self._removers.append(undo)


class Refusal(Uncopyable):
    """Stands in for `module._apply`, through which every conversion of a module goes."""

    def __init__(self, module: nn.Module, dtypes: list[torch.dtype], device: torch.device) -> None:
        self._module, self._dtypes, self._device = weakref.ref(module), set(dtypes), device

    def __call__(self, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        module = self._module()
        assert module is not None
        for dtype in self._dtypes:
            before = torch.zeros((), dtype=dtype, device=self._device)
            after = convert(before)
            if (after.dtype, after.device) != (before.dtype, before.device):
                raise OffloadError(
                    f"{type(module).__name__} cannot be moved or converted while its weights are offloaded; call "
                    f"handle.disable() first, then offload again"
                )
        return module


class _Saving(Uncopyable):
    """Puts the real weights into a state dict; called by torch with (module, state dict, prefix, metadata)."""

    def __init__(self, group: Group, streamer: Streamer) -> None:
        self._group, self._streamer = group, streamer

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for entry, tensor in loaded(self._streamer.source, self._group).items():
            key = f"{prefix}{names.get(id(entry.parameter))}"
            if key in state:
                state[key] = tensor


class _Loading(Uncopyable):
    """Refuses values for offloaded weights; others, such as those of an adapter, may be loaded."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        offloaded = {id(entry.parameter) for entry in self._group.entries}
        names = (name for name, parameter in module.named_parameters() if id(parameter) in offloaded)
        if any(f"{prefix}{name}" in state for name in names):
            raise OffloadError(
                f"weights cannot be loaded into {type(module).__name__} while they are offloaded; call "
                f"handle.disable() first"
            )


def refuse_compiled(name: str, component: nn.Module) -> None:
    """A component that is compiled as a whole runs no hooks inside."""
    if isinstance(component._modules.get("_orig_mod"), nn.Module) or is_compiled(component):
        raise OffloadError(
            f"`{name}` is compiled as a whole, so that weights of its blocks cannot come and go; compile its blocks "
            f"instead: model.compile_repeated_blocks()"
        )


def _refuse_fusing() -> NoReturn:
    raise OffloadError(
        "adapters cannot be fused into weights that are offloaded; call handle.disable() first, then offload again"
    )


def _refuse_gradients(group: Group, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.is_grad_enabled():
        return
    given = (tensor for value in (*args, *kwargs.values()) for tensor in tensors_in(value))
    if any(entry.parameter.requires_grad for entry in group.entries) or any(tensor.requires_grad for tensor in given):
        raise OffloadError(
            f"{group.name} would keep its weights for a backward pass, but they are offloaded; call the model under "
            f"torch.no_grad(), or handle.disable() first"
        )


def _own_memory(output: Any, slot: Slot) -> Any:
    """An output that is a view of a weight gets memory of its own: the buffer will hold other weights."""
    begin = slot.buffer.data_ptr()
    end = begin + len(slot.buffer)
    if any(begin <= tensor.data_ptr() < end for tensor in tensors_in(output)):
        return replace_tensors(output, lambda tensor, _: tensor.clone())
    return output
