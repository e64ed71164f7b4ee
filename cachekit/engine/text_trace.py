"""The first call of its form: finds the modules whose result does not depend on the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cachekit.engine.binding import items, tensors_in
from cachekit.engine.conditioning import Conditioning, TensorLeaf
from cachekit.engine.dataflow import SOURCE, Dataflow, Frame, tensors_of
from cachekit.engine.discovery import find_attention
from cachekit.engine.history import Entry
from cachekit.engine.hooks import Inner
from cachekit.engine.sites import PassContext, Saving, SitePass
from cachekit.engine.text_plan import Kept, Moving, Plan, Unit

NOTHING = (
    "nothing constant here: every key and value of attention depends on the latents or the timestep, as in joint "
    "attention; disable text_kv on this model"
)
NUMBER = (
    "nothing is known to be constant: the timestep is a Python number, which cannot be followed through the model; "
    "pass it as a tensor"
)


@dataclass
class _Found:
    """A constant module call and its result."""

    path: str
    labels: int
    output: Any
    attends: bool
    saving: Saving


class TextTrace(SitePass):
    """Follows latents and timestep through a call in which every module is hooked.

    Chosen are the largest modules with projections whose result no source reaches and that do nothing but return it,
    as far as they belong to attention or depend on nothing else than what keys and values depend on.

    Args:
        denoiser: the model.
        sources: the latents and the timesteps as they were passed.
        moving: the same as leaves.
        foreign: ids of modules that another site watches: their calls have to happen.
        start, end: hook all modules, and take the hooks off again.
        learn: called with what was found.
        context: what a pass needs.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        sources: list[Any],
        moving: Moving,
        foreign: frozenset[int],
        start: Callable[[], None],
        end: Callable[[], None],
        learn: Callable[[Plan], None],
        context: PassContext,
    ) -> None:
        self._denoiser, self._sources, self._moving, self._foreign = denoiser, sources, moving, foreign
        self._start, self._end, self._learn, self._context = start, end, learn, context
        self._attention = frozenset(find_attention(denoiser))
        self._flow: Dataflow | None = None
        self._found: list[_Found] = []
        self._calls: dict[str, int] = {}
        self._foreign_calls = self._projections = 0
        self._counts_by_number = any(isinstance(value, (int, float)) for value in sources)
        self.nothing_kept = NUMBER if self._counts_by_number else NOTHING
        context.history.clear()
        context.decide(None)

    def around(self, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._start()
        try:
            leaves = self._context.conditioning.leaves.items()
            self._flow = Dataflow(
                tensors_in(self._sources),
                {name: leaf.tensor for name, leaf in leaves if isinstance(leaf, TensorLeaf)},
                tensors_of(self._denoiser),
            )
            if self._counts_by_number:
                self._flow.reads_source()
            with self._flow:
                return inner(*args, **kwargs)
        finally:
            self._end()

    def run(self, slot: str, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flow, module = self._flow, self._denoiser.get_submodule(slot)
        assert flow is not None
        self._calls[slot] = self._calls.get(slot, 0) + 1
        known, foreign, projections = len(self._found), self._foreign_calls, self._projections
        self._foreign_calls += id(module) in self._foreign
        frame = flow.enter((args, kwargs))
        try:
            output = inner(*args, **kwargs)
        finally:
            flow.leave(frame)
        if module._parameters or slot in self._attention:
            # What kernels that torch does not dispatch write is unknown: it may hold whatever was passed in.
            flow.add(output, frame.labels)
        if not frame.flops:
            frame.flops = _flops_by_width(module, output)
        if frame.flops and not module._modules:
            self._projections += 1
        saving = Saving(self._projections - projections, frame.flops)
        alone = self._foreign_calls == foreign and not any(part.training for part in module.modules())
        if alone and saving.projections and self._is_constant(frame, output):
            del self._found[known:]
            self._found.append(_Found(slot, flow.labels(output), _copy(output), self._attends(slot), saving))
        return output

    def finish(self) -> Entry | None:
        entry, context, flow = Entry(self._context.now.step), self._context, self._flow
        if flow is None or not context.undisturbed():
            return entry
        chosen = self._chosen()
        steering = _read_by_python(context.conditioning)
        plan = Plan((_unit(found, flow, steering) for found in chosen), self._denoiser, self.nothing_kept)
        self._learn(plan)
        for found in chosen:
            for key, part in items(found.output):
                if part is not None:
                    entry.values[found.path, key] = context.storage.keep(part)
        Kept.put(entry, plan, plan.leaves(context.conditioning), self._moving)
        return entry if chosen else None

    def _chosen(self) -> list[_Found]:
        """Modules called once that are, hold or lead to keys and values; none where no such thing is constant."""
        once = [found for found in self._found if self._calls[found.path] == 1]
        text = 0
        for found in once:
            text |= found.labels if found.attends else 0
        if not any(found.attends for found in once):
            return []
        return [found for found in once if found.attends or (found.labels and not found.labels & ~text)]

    def _attends(self, path: str) -> bool:
        """True for attention, what is in it, and what contains it."""
        return any(f"{path}.".startswith(f"{name}.") or name.startswith(f"{path}.") for name in self._attention)

    def _is_constant(self, frame: Frame, output: Any) -> bool:
        """True when a result can stand for the call: no source reaches it, and the call did nothing else."""
        flow = self._flow
        assert flow is not None
        if not frame.pure or not isinstance(output, (torch.Tensor, tuple, list)):
            return False
        parts = [part for _, part in items(output) if part is not None]
        if not parts or not all(type(part) is torch.Tensor for part in parts):
            return False
        if type(output) not in (torch.Tensor, tuple, list) or flow.labels(parts) & SOURCE:
            return False
        memory = {part.untyped_storage()._cdata for part in parts}
        return len(memory) == len(parts) and all(flow.is_new(part, frame) and _is_dense(part) for part in parts)


def _flops_by_width(module: nn.Module, output: Any) -> int:
    """Operations of a projection whose kernel torch has no formula for, such as one of quantised weights."""
    width = getattr(module, "in_features", None)
    if not isinstance(width, int):
        return 0
    return sum(2 * tensor.numel() * width for tensor in tensors_in(output))


def _read_by_python(conditioning: Conditioning) -> frozenset[str]:
    """Masks, lengths and positions: models turn them into Python numbers in ways that leave no trace (`tolist`)."""
    leaves = conditioning.leaves.items()
    return frozenset(
        name for name, leaf in leaves if isinstance(leaf, TensorLeaf) and not leaf.tensor.is_floating_point()
    )


def _unit(found: _Found, flow: Dataflow, steering: frozenset[str]) -> Unit:
    tensors = {key: part for key, part in items(found.output) if part is not None}
    form = None if None in tensors else type(found.output)(None for _ in found.output)
    devices = {key: part.device for key, part in tensors.items()}
    return Unit(found.path, flow.named(found.labels) | steering, form, devices, found.attends, found.saving)


def _copy(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.detach().clone()
    return type(output)(None if part is None else part.detach().clone() for part in output)


def _is_dense(tensor: torch.Tensor) -> bool:
    """True when a copy has the same strides."""
    return tensor.layout == torch.strided and torch.empty_like(tensor, device="meta").stride() == tensor.stride()
