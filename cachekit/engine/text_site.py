"""Site: the projections of the text stream, which are the same at every step where text is not mixed with the latents.

Nothing is hooked before the first call. That call is traced: a module call whose result carries no label of the
latents or the timestep is constant (:mod:`cachekit.engine.dataflow`). Kept are the largest constant modules that hold
keys and values of attention, and those that such keys and values are made from. The second computed call compares
their results bit by bit; from then on they are handed out for as long as the arguments they depend on hold the values
they held.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from cachekit.engine import observers
from cachekit.engine.binding import Key, items, rebuild, tensors_in
from cachekit.engine.conditioning import Conditioning, TensorLeaf
from cachekit.engine.dataflow import SOURCE, Dataflow, Frame, tensors_of
from cachekit.engine.discovery import find_attention, latent_names, timestep_names
from cachekit.engine.history import Entry
from cachekit.engine.hooks import Hook, Inner, compiled_parent
from cachekit.engine.rules import TextSpec
from cachekit.engine.sites import PassContext, Saving, Site, SitePass

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_KEPT = "kept"
Moving = tuple[tuple[TensorLeaf, ...], ...]

TRAINING = "the model is in training mode; call eval() on it"
CHANGED = "the text is not what it was"
COMPILED = "hooks inside it no longer run; call disable_cache, or enable the cache on a model that is not compiled"
UNPROVEN = "compares with what the first call kept"
NOTHING = (
    "nothing constant here: every key and value of attention depends on the latents or the timestep, as in joint "
    "attention, so there is nothing to keep"
)


@dataclass(frozen=True)
class Unit:
    """A module whose result does not depend on the step.

    Attributes:
        path: its path in the denoiser.
        arguments: names of the tensors among the denoiser's arguments that the result depends on.
        form: the result with None for its tensors.
        devices: output key -> device of the tensor.
        attends: True for what belongs to attention, False for what only leads there.
        saving: what a reuse spares.
    """

    path: str
    arguments: frozenset[str]
    form: Any = field(repr=False)
    devices: Mapping[Key, torch.device] = field(repr=False)
    attends: bool
    saving: Saving


class Plan:
    """What is constant in calls of one form; `confirmed` once two computed calls gave the same bits."""

    def __init__(self, units: Iterable[Unit], denoiser: nn.Module) -> None:
        self.units = {unit.path: unit for unit in units}
        self.confirmed = False
        inside = [denoiser.get_submodule(path) for path in self.units]
        self._modules = [weakref.ref(part) for module in inside for part in module.modules()]

    @property
    def arguments(self) -> frozenset[str]:
        """All arguments that anything depends on."""
        return frozenset().union(*(unit.arguments for unit in self.units.values()))

    def trains(self) -> bool:
        """True when one of the modules was set to training mode."""
        modules = (reference() for reference in self._modules)
        return any(module.training for module in modules if module is not None)


@dataclass
class Kept:
    """What the results in an entry were made from: the plan, the arguments, and the latents and timesteps."""

    plan: Plan
    leaves: dict[str, TensorLeaf]
    moving: Moving


class TextSite(Site):
    """Hooks what a trace finds constant; knows this per form of the call, over all runs."""

    rank = 3

    def __init__(self, spec: TextSpec, denoiser: nn.Module) -> None:
        super().__init__()
        self._denoiser = weakref.ref(denoiser)
        self._latents, self._times = latent_names(denoiser), timestep_names(denoiser)
        self._plans: dict[Hashable, Plan] = {}
        self._hooked: dict[str, Hook] = {}
        self._foreign: frozenset[int] = frozenset()
        self._tracing = 0
        self._lock = threading.RLock()
        self._seen = observers.registrations()
        self._tree: tuple[int, ...] = ()
        self._blocked: str | None = None
        self._processors: list[tuple[weakref.ref[nn.Module], Any]] = []
        self._look()

    def describe(self) -> str:
        if not self._plans:
            return "text projections, to be found in the first call"
        found = max(self._plans.values(), key=lambda plan: len(plan.units))
        count = sum(unit.saving.projections for unit in found.units.values())
        return f"{count} text projections" if count else "no text projection: nothing constant here"

    def remove(self) -> None:
        super().remove()
        with self._lock:
            self._plans, self._hooked = {}, {}

    def meet(self, others: Iterable[Site]) -> None:
        modules = (hook.module for site in others for hook in site.hooks)
        with self._lock:
            self._foreign = frozenset(id(module) for module in modules)
            self._start_over()

    def compiled(self, module: nn.Module) -> None:
        denoiser = self._denoiser()
        parent = None if denoiser is None else compiled_parent(denoiser, (f"{at}." for at in find_attention(denoiser)))
        self._blocked = None if parent is None else f"{parent or 'the model'} was compiled, so {COMPILED}"

    def begin(self, branch: str, context: PassContext) -> SitePass:
        denoiser = self._denoiser()
        assert denoiser is not None
        with self._lock:
            if observers.registrations() != self._seen or self._processors_changed():
                self._look()
            key = self._form(context)
            plan = self._plans.get(key)
        if self._blocked is not None:
            return IdlePass(context, self._blocked, keeps=False)
        if denoiser.training or (plan is not None and plan.trains()):
            return IdlePass(context, TRAINING)
        if torch.is_grad_enabled():
            return IdlePass(context, None)
        if plan is not None and not plan.units:
            return IdlePass(context, NOTHING, keeps=False)
        moving = () if plan is not None and plan.confirmed else self._moving(context.arguments)
        if plan is None:
            return TracePass(self, denoiser, key, moving, context)
        return TextPass(plan, moving, context)

    def _moving(self, arguments: Mapping[str, Any]) -> Moving:
        return tuple(
            tuple(TensorLeaf.of(tensor) for name in names for tensor in tensors_in(arguments.get(name)))
            for names in (self._latents, self._times)
        )

    def sources(self, arguments: Mapping[str, Any]) -> list[Any]:
        """The latents and the timesteps among the arguments of a call."""
        return [arguments.get(name) for name in (*self._latents, *self._times)]

    def is_foreign(self, module: nn.Module) -> bool:
        """True when another site watches this module, so that its calls have to happen."""
        return id(module) in self._foreign

    def learn(self, key: Hashable, plan: Plan) -> None:
        """Set what is constant in calls of one form."""
        with self._lock:
            self._plans[key] = plan
            self._hook(plan.units)

    def start_trace(self, denoiser: nn.Module) -> None:
        """Hook every module for the time of a call."""
        with self._lock:
            self._tracing += 1
            self._hook(path for path, _ in denoiser.named_modules() if path)

    def end_trace(self) -> None:
        """Take the hooks off that no plan needs."""
        with self._lock:
            self._tracing -= 1
            self._prune()

    def _hook(self, paths: Iterable[str]) -> None:
        denoiser = self._denoiser()
        assert denoiser is not None
        for path in paths:
            if path not in self._hooked:
                self.attach(denoiser.get_submodule(path), path)
                self._hooked[path] = self.hooks[-1]

    def _prune(self) -> None:
        if self._tracing:
            return
        used = {path for plan in self._plans.values() for path in plan.units}
        for path in [path for path in self._hooked if path not in used]:
            self._hooked.pop(path).remove()
        self.hooks = list(self._hooked.values())

    def _start_over(self) -> None:
        """Forget what is known and hook nothing that a trace under way does not need."""
        self._plans = {}
        self._prune()

    def _look(self) -> None:
        """Take notice of the modules and attention processors; what was known of others is forgotten."""
        self._seen = observers.registrations()
        denoiser = self._denoiser()
        modules = [] if denoiser is None else list(denoiser.modules())
        tree = tuple(id(module) for module in modules)
        if tree != self._tree or self._processors_changed():
            for path in list(self._hooked):
                self._hooked.pop(path).remove()
            self.hooks = []
            self._start_over()
        self._tree = tree
        self._processors = [
            (weakref.ref(module), _reference(module.processor)) for module in modules if hasattr(module, "processor")
        ]

    def _processors_changed(self) -> bool:
        return any(
            module is not None and getattr(module, "processor", None) is not processor()
            for module, processor in ((reference(), processor) for reference, processor in self._processors)
        )

    def _form(self, context: PassContext) -> Hashable:
        """Calls that agree in this take the same way through the model."""
        leaves = tuple(
            (name, leaf.signature if isinstance(leaf, TensorLeaf) else _plain(leaf))
            for name, leaf in sorted(context.conditioning.leaves.items())
        )
        kind = next((tensor.device.type for tensor in context.sources), "cpu")
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        return context.signature, leaves, autocast, torch.are_deterministic_algorithms_enabled()


class IdlePass(SitePass):
    """A call in which nothing may be kept; with `keeps` False there is nothing to keep, for the reason given."""

    def __init__(self, context: PassContext, objection: str | None, keeps: bool = True) -> None:
        self._entry = Entry(context.now.step) if keeps else None
        self.nothing_kept = objection or ""
        context.history.clear()
        context.decide(None, objection)

    def passes_by(self, slot: str) -> bool:
        return True

    def finish(self) -> Entry | None:
        return self._entry


@dataclass
class _Found:
    """A constant module call of a trace and its result."""

    path: str
    labels: int
    output: Any
    attends: bool
    saving: Saving


class TracePass(SitePass):
    """The first call of its form: finds what is constant and keeps it."""

    nothing_kept = NOTHING

    def __init__(
        self,
        site: TextSite,
        denoiser: nn.Module,
        key: Hashable,
        moving: Moving,
        context: PassContext,
    ) -> None:
        self._site, self._denoiser, self._key, self._moving, self._context = site, denoiser, key, moving, context
        self._attention = frozenset(find_attention(denoiser))
        self._flow: Dataflow | None = None
        self._found: list[_Found] = []
        self._calls: dict[str, int] = {}
        self._foreign = self._projections = 0
        context.history.clear()
        context.decide(None)

    def around(self, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._site.start_trace(self._denoiser)
        try:
            sources = self._site.sources(self._context.arguments)
            leaves = self._context.conditioning.leaves.items()
            self._flow = Dataflow(
                tensors_in(sources),
                {name: leaf.tensor for name, leaf in leaves if isinstance(leaf, TensorLeaf)},
                tensors_of(self._denoiser),
            )
            if any(isinstance(value, (int, float)) for value in sources):
                self._flow.reads_source()
            with self._flow:
                return inner(*args, **kwargs)
        finally:
            self._site.end_trace()

    def run(self, slot: str, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flow = self._flow
        assert flow is not None
        module = self._denoiser.get_submodule(slot)
        self._calls[slot] = self._calls.get(slot, 0) + 1
        known, foreign, projections = len(self._found), self._foreign, self._projections
        self._foreign += self._site.is_foreign(module)
        frame = flow.enter((args, kwargs))
        try:
            output = inner(*args, **kwargs)
        finally:
            flow.leave(frame)
        if module._parameters or slot in self._attention:
            # What kernels that torch does not dispatch write is unknown: it may hold whatever was passed in.
            flow.add(output, frame.labels)
        if not frame.flops and hasattr(module, "in_features"):
            frame.flops = sum(2 * tensor.numel() * int(module.in_features) for tensor in tensors_in(output))
        if frame.flops and not module._modules:
            self._projections += 1
        saving = Saving(self._projections - projections, frame.flops)
        if self._foreign == foreign and saving.projections and self._is_constant(frame, output):
            if not any(part.training for part in module.modules()):
                del self._found[known:]
                attends = self._attends(slot)
                self._found.append(_Found(slot, flow.labels(output), _copy(output), attends, saving))
        return output

    def finish(self) -> Entry | None:
        entry, context, flow = Entry(self._context.now.step), self._context, self._flow
        if not context.undisturbed() or flow is None:
            return entry
        once = [found for found in self._found if self._calls[found.path] == 1]
        text = 0
        for found in once:
            text |= found.labels if found.attends else 0
        chosen = [found for found in once if found.attends or (found.labels and not found.labels & ~text)]
        if not any(found.attends for found in chosen):
            chosen = []
        steering = _read_by_python(context.conditioning)
        plan = Plan((_unit(found, flow, steering) for found in chosen), self._denoiser)
        self._site.learn(self._key, plan)
        if not chosen:
            return None
        for found in chosen:
            for key, part in items(found.output):
                if part is not None:
                    entry.values[found.path, key] = context.storage.keep(part)
        entry.passive[_KEPT] = Kept(plan, _leaves(plan, context.conditioning), self._moving)
        return entry

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
        if len({part.untyped_storage()._cdata for part in parts}) < len(parts):
            return False
        return not flow.labels(parts) & SOURCE and all(flow.is_new(part, frame) and _is_dense(part) for part in parts)


class TextPass(SitePass):
    """A call of a known form: hands out what is kept, or computes and keeps it, comparing where that is due."""

    def __init__(self, plan: Plan, moving: Moving, context: PassContext) -> None:
        self._plan, self._moving, self._context = plan, moving, context
        self._units = plan.units
        self._leaves = _leaves(plan, context.conditioning)
        self._calls: set[str] = set()
        self._flags: dict[str, torch.Tensor] = {}
        newest = context.history.newest
        kept = None if newest is None else newest.passive.get(_KEPT)
        self._before = newest if isinstance(kept, Kept) and kept.plan is plan else None
        self._kept = kept if self._before is not None else None
        self._usable = self._unchanged()
        objection = None
        if newest is not None and not self._usable:
            context.history.clear()
            objection = CHANGED if newest.values else None
        elif not plan.confirmed:
            objection = UNPROVEN if newest is not None else None
        self._reuse = context.decide(None, objection)
        if not self._reuse and objection != UNPROVEN:
            self._before = None
        self._entry = Entry(context.now.step)

    def passes_by(self, slot: str) -> bool:
        return slot not in self._units or slot in self._calls

    def run(self, slot: str, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._calls.add(slot)
        unit = self._units.get(slot)
        if unit is None or self._context.altered() or (self._reuse and slot not in self._usable):
            return inner(*args, **kwargs)
        if self._reuse:
            self.saving += unit.saving
            return self._answer(unit)
        output = inner(*args, **kwargs)
        self._keep(unit, output)
        return output

    def finish(self) -> Entry | None:
        if self._reuse:
            assert self._kept is not None
            self._kept.leaves, self._kept.moving = self._leaves, ()
            return None
        self._confirm()
        if self._entry.values:
            self._entry.passive[_KEPT] = Kept(self._plan, self._leaves, self._moving)
        return self._entry

    def _unchanged(self) -> frozenset[str]:
        """Paths of the modules whose kept results hold for the arguments of this call."""
        if self._before is None or self._kept is None:
            return frozenset()
        same = self._context.comparer.same
        old, new = self._kept.leaves, self._leaves
        changed = {
            name
            for name in old.keys() | new.keys()
            if name not in old or name not in new or not same(old[name], new[name])
        }
        held = {path for path, _ in self._before.values}  # type: ignore[misc]
        stale = {path for path in held if path not in self._units or self._units[path].arguments & changed}
        self._context.history.drop([place for place in self._before.values if place[0] in stale])  # type: ignore[index]
        return frozenset(held - stale)

    def _answer(self, unit: Unit) -> Any:
        parts: dict[Key, Any] = dict(items(unit.form))
        for key, device in unit.devices.items():
            value = self._context.predict((unit.path, key))
            assert value is not None
            parts[key] = value.to(device)
        return rebuild(unit.form, parts)

    def _keep(self, unit: Unit, output: Any) -> None:
        parts = {key: part for key, part in items(output) if isinstance(part, torch.Tensor)}
        if parts.keys() != unit.devices.keys():
            return
        for key, part in parts.items():
            place = unit.path, key
            old = None if self._before is None else self._before.values.get(place)
            if old is None:
                self._entry.values[place] = self._context.storage.keep(part.detach().clone())
            else:
                self._entry.values[place] = old
                same = _same_bits(old.to(part.device), part.detach())
                self._flags[unit.path] = self._flags[unit.path] & same if unit.path in self._flags else same

    def _confirm(self) -> None:
        """Read the comparisons with the first call back, at once where all are equal."""
        if self._kept is None or self._before is None or not self._context.undisturbed() or not self._moved():
            return
        flags = [flag.to(self._context.sources[0].device) for flag in self._flags.values()]
        if flags and self._context.read(torch.stack(flags).all()) != 1:
            wrong = {path for path, flag in self._flags.items() if self._context.read(flag) != 1}
            self._plan.units = {path: unit for path, unit in self._units.items() if path not in wrong}
            values = self._entry.values.items()
            self._entry.values = {at: value for at, value in values if at[0] not in wrong}  # type: ignore[index]
        self._plan.confirmed = True

    def _moved(self) -> bool:
        """True when both the latents and the timestep differ from the first call's."""
        assert self._kept is not None
        same = self._context.comparer.same
        pairs = zip(self._kept.moving, self._moving, strict=True)
        return all(
            not new or any(not same(a, b) for a, b in zip(old, new, strict=False)) or len(old) != len(new)
            for old, new in pairs
        )


def _leaves(plan: Plan, conditioning: Conditioning) -> dict[str, TensorLeaf]:
    leaves = {name: conditioning.leaves.get(name) for name in plan.arguments}
    return {name: leaf for name, leaf in leaves.items() if isinstance(leaf, TensorLeaf)}


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


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """A flag on the device; NaN equals NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return torch.zeros((), dtype=torch.bool, device=second.device)
    return ((first == second) | ((first != first) & (second != second))).all()


def _plain(value: Any) -> Hashable:
    return value if isinstance(value, _PLAIN) else type(value)


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return partial(_itself, value)


def _itself(value: Any) -> Any:
    return value
