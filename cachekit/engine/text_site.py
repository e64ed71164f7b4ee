"""Site: the projections of the text stream, which are the same at every step where text is not mixed with the latents.

Nothing is hooked before the first call. That call is traced: a module call whose result carries no label of the
latents or the timestep is constant (:mod:`cachekit.engine.dataflow`). The second computed call compares results bit
by bit; from then on they are handed out for as long as the arguments they depend on hold the values they held.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from cachekit.engine import observers
from cachekit.engine.binding import Key, items, rebuild, tensors_in
from cachekit.engine.conditioning import TensorLeaf
from cachekit.engine.discovery import find_attention, latent_names, timestep_names
from cachekit.engine.history import Entry
from cachekit.engine.hooks import Hook, Inner, compiled_parent
from cachekit.engine.rules import TextSpec
from cachekit.engine.sites import PassContext, Site, SitePass
from cachekit.engine.text_plan import KEPT, Kept, Moving, Plan, Unit
from cachekit.engine.text_trace import TextTrace

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_MOST_PLANS = 32

TRAINING = "the model is in training mode; call eval() on it"
COMPILED = "hooks inside it no longer run; call disable_cache, or enable the cache on a model that is not compiled"
CHANGED = "the text is not what it was"
UNPROVEN = "compares with what the first call kept"


class TextSite(Site):
    """Hooks what a trace finds constant; knows this per form of the call, over all runs."""

    rank = 3

    def __init__(self, spec: TextSpec, denoiser: nn.Module) -> None:
        super().__init__()
        self._denoiser = weakref.ref(denoiser)
        self._latents, self._times = latent_names(denoiser), timestep_names(denoiser)
        self._plans: dict[Hashable, Plan] = {}
        self._generation = 0
        self._hooked: dict[str, Hook] = {}
        self._foreign: frozenset[int] = frozenset()
        self._tracing, self._removed = 0, False
        self._blocked: str | None = None
        self._lock = threading.RLock()
        self._seen = observers.registrations()
        self._tree: list[weakref.ref[nn.Module]] = []
        self._processors: list[tuple[weakref.ref[nn.Module], Callable[[], Any]]] = []
        self._look(denoiser)

    def describe(self) -> str:
        plans = list(self._plans.values())
        if not plans:
            return "text projections, to be found in the first call"
        count = max(plan.projections for plan in plans)
        return f"{count} text projections" if count else "no text projection: nothing constant here"

    def remove(self) -> None:
        with self._lock:
            self._removed = True
            self._start_over()
            super().remove()

    def meet(self, others: Sequence[Site]) -> None:
        modules = (hook.module for site in others for hook in site.hooks)
        with self._lock:
            self._foreign = frozenset(id(module) for module in modules if module is not None)
            self._start_over()

    def compiled(self, module: nn.Module) -> None:
        denoiser = self._denoiser()
        parent = None if denoiser is None else compiled_parent(denoiser, inside_attention(denoiser))
        self._blocked = None if parent is None else f"{parent or 'the model'} was compiled, so {COMPILED}"

    def begin(self, branch: str, context: PassContext) -> SitePass:
        denoiser = self._denoiser()
        assert denoiser is not None
        if self._blocked is not None:
            return IdlePass(context, self._blocked, keeps=False)
        with self._lock:
            if observers.registrations() != self._seen or self._processors_changed():
                self._look(denoiser)
            form = self._form(context)
            plan = self._plans.get(form)
            if plan is not None and plan.recast():
                plan = None
        if denoiser.training or (plan is not None and plan.trains()):
            return IdlePass(context, TRAINING)
        if plan is None:
            return self._trace(denoiser, form, context)
        if not plan.units:
            return IdlePass(context, plan.nothing, keeps=False)
        return TextPass(plan, self._moving(context.arguments) if plan.is_open else (), context)

    def _trace(self, denoiser: nn.Module, form: Hashable, context: PassContext) -> SitePass:
        obstacle = context.forced()
        if obstacle is not None:
            # Arguments that take another form in every call would be traced in every call.
            return IdlePass(context, obstacle)
        return TextTrace(
            denoiser,
            [context.arguments.get(name) for name in (*self._latents, *self._times)],
            self._moving(context.arguments),
            self._foreign,
            partial(self._start_trace, denoiser),
            self._end_trace,
            partial(self._learn, form, self._generation),
            context,
        )

    def _moving(self, arguments: Mapping[str, Any]) -> Moving:
        return tuple(
            tuple(TensorLeaf.of(tensor) for name in names for tensor in tensors_in(arguments.get(name)))
            for names in (self._latents, self._times)
        )

    def _start_trace(self, denoiser: nn.Module) -> None:
        with self._lock:
            self._tracing += 1
            self._hook(path for path, _ in denoiser.named_modules() if path)

    def _end_trace(self) -> None:
        with self._lock:
            self._tracing -= 1
            self._prune()

    def _learn(self, form: Hashable, generation: int, plan: Plan) -> None:
        with self._lock:
            if generation == self._generation:
                while len(self._plans) >= _MOST_PLANS:
                    del self._plans[next(iter(self._plans))]
                self._plans[form] = plan
                self._hook(plan.units)

    def _hook(self, paths: Iterable[str]) -> None:
        denoiser = self._denoiser()
        if self._removed or denoiser is None:
            return
        for path in paths:
            if path not in self._hooked:
                self.attach(denoiser.get_submodule(path), path)
                self._hooked[path] = self.hooks[-1]

    def _prune(self) -> None:
        """Take the hooks off that neither a plan nor a trace under way needs."""
        if self._tracing and not self._removed:
            return
        used = {path for plan in self._plans.values() for path in plan.units}
        for path in [path for path in self._hooked if path not in used]:
            self._hooked.pop(path).remove()
        self.hooks = list(self._hooked.values())

    def _start_over(self) -> None:
        """Forget what is known, also what a trace under way will find."""
        self._generation += 1
        self._plans = {}
        self._prune()

    def _look(self, denoiser: nn.Module) -> None:
        """Take notice of modules and attention processors; what was known when there were others is forgotten."""
        self._seen = observers.registrations()
        modules = list(denoiser.modules())
        same = len(modules) == len(self._tree) and all(
            reference() is module for reference, module in zip(self._tree, modules, strict=True)
        )
        if not same or self._processors_changed():
            for path in list(self._hooked):
                self._hooked.pop(path).remove()
            self._start_over()
        self._tree = [weakref.ref(module) for module in modules]
        self._processors = [
            (weakref.ref(module), _reference(module.processor)) for module in modules if hasattr(module, "processor")
        ]

    def _processors_changed(self) -> bool:
        return any(
            module is not None and getattr(module, "processor", None) is not processor()
            for module, processor in ((reference(), processor) for reference, processor in self._processors)
        )

    def _form(self, context: PassContext) -> Hashable:
        """Calls that agree in this take the same way through the model, with the same arithmetic."""
        leaves = tuple(
            (name, leaf.signature if isinstance(leaf, TensorLeaf) else _plain(leaf))
            for name, leaf in sorted(context.conditioning.leaves.items())
        )
        kind = next((tensor.device.type for tensor in context.sources), "cpu")
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        return context.signature, leaves, autocast, torch.are_deterministic_algorithms_enabled()


class IdlePass(SitePass):
    """A call in which nothing may be kept; with `keeps` False there is nothing to keep, for the reason given."""

    def __init__(self, context: PassContext, objection: str, keeps: bool = True) -> None:
        self._entry = Entry(context.now.step) if keeps else None
        self.nothing_kept = objection
        context.history.clear()
        context.decide(None, objection)

    def passes_by(self, slot: str) -> bool:
        return True

    def finish(self) -> Entry | None:
        return self._entry


class TextPass(SitePass):
    """A call of a known form: hands out what is kept, or computes and keeps it, comparing where that is due."""

    def __init__(self, plan: Plan, moving: Moving, context: PassContext) -> None:
        self._plan, self._moving, self._context = plan, moving, context
        self._units, self._confirmed = plan.units, plan.confirmed
        self._leaves = plan.leaves(context.conditioning)
        self._calls: set[str] = set()
        self._flags: dict[str, torch.Tensor] = {}
        newest = context.history.newest
        kept = None if newest is None else newest.passive.get(KEPT)
        self._kept = kept if isinstance(kept, Kept) and kept.plan is plan else None
        self._before = {} if newest is None or self._kept is None else dict(newest.values)
        self._usable = self._unchanged()
        self._reuse = context.decide(None, self._objection())
        if not self._reuse and context.forced() is not None:
            self._usable = frozenset()
        self._entry = Entry(
            context.now.step, {at: kept for at, kept in self._before.items() if _path(at) in self._usable}
        )

    def passes_by(self, slot: str) -> bool:
        return slot not in self._units or slot in self._calls

    def run(self, slot: str, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._calls.add(slot)
        unit = self._units[slot]
        if self._context.altered():
            return inner(*args, **kwargs)
        if self._reuse and slot in self._usable & self._confirmed:
            self.saving += unit.saving
            return self._answer(unit)
        output = inner(*args, **kwargs)
        if slot in self._usable:
            self._compare(unit, output)
        elif not self._reuse:
            self._keep(unit, output)
        return output

    def finish(self) -> Entry | None:
        wrong = self._settle()
        moving = () if not self._plan.is_open else self._moving if self._kept is None else self._kept.moving
        if self._reuse:
            assert self._kept is not None
            self._kept.refresh(self._leaves)
            self._kept.moving = moving
            self._context.history.drop([place for place in self._before if _path(place) in wrong])
            return None
        values = self._entry.values.items()
        self._entry.values = {place: value for place, value in values if _path(place) not in wrong}
        if self._entry.values:
            Kept.put(self._entry, self._plan, self._leaves, moving if self._usable else self._moving)
        return self._entry

    def _objection(self) -> str | None:
        if self._usable:
            return None if self._usable & self._confirmed else UNPROVEN
        self._context.history.clear()
        return CHANGED if self._before else None

    def _unchanged(self) -> frozenset[str]:
        """Paths of the modules whose kept results hold for the arguments of this call; the others are let go."""
        if self._kept is None:
            return frozenset()
        same = self._context.comparer.same
        old, new = self._kept.leaves, self._leaves
        changed = {
            name
            for name in old.keys() | new.keys()
            if name not in old or name not in new or not same(old[name], new[name])
        }
        held = {_path(place) for place in self._before}
        stale = {path for path in held if path not in self._units or self._units[path].arguments & changed}
        self._context.history.drop([place for place in self._before if _path(place) in stale])
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
        if parts.keys() == unit.devices.keys():
            for key, part in parts.items():
                self._entry.values[unit.path, key] = self._context.storage.keep(part.detach().clone())

    def _compare(self, unit: Unit, output: Any) -> None:
        """With what is kept of it, unless another rule has skipped something that may have led here."""
        if unit.path in self._confirmed or not self._context.undisturbed():
            return
        parts = {key: part for key, part in items(output) if isinstance(part, torch.Tensor)}
        pairs = [(self._before[unit.path, key], part) for key, part in parts.items() if key in unit.devices]
        flags = [_same_bits(kept.to(part.device), part.detach()) for kept, part in pairs]
        if len(flags) == len(unit.devices) == len(parts):
            self._flags[unit.path] = torch.stack([flag.to(flags[0].device) for flag in flags]).all()

    def _settle(self) -> frozenset[str]:
        """Read the comparisons back, all at once where they are equal; returns the paths where they are not."""
        if not self._flags or not self._moved():
            return frozenset()
        read, flags = self._context.read, list(self._flags.values())
        wrong: frozenset[str] = frozenset()
        if not read(torch.stack([flag.to(flags[0].device) for flag in flags]).all()):
            wrong = frozenset(path for path, flag in self._flags.items() if not read(flag))
        self._plan.settle(frozenset(self._flags) - wrong, wrong)
        return wrong

    def _moved(self) -> bool:
        """True when both the latents and the timestep differ from the first call's."""
        assert self._kept is not None
        same = self._context.comparer.same
        return all(
            not new or len(old) != len(new) or not all(same(a, b) for a, b in zip(old, new, strict=True))
            for old, new in zip(self._kept.moving, self._moving, strict=True)
        )


def inside_attention(denoiser: nn.Module) -> list[str]:
    """Prefixes of the paths of all modules inside attention."""
    return [f"{path}." for path in find_attention(denoiser)]


def _path(place: Hashable) -> str:
    """The module that a place of an entry belongs to."""
    assert isinstance(place, tuple)
    return str(place[0])


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """A flag on the device; NaN equals NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return torch.zeros((), dtype=torch.bool, device=second.device)
    return ((first == second) | ((first != first) & (second != second))).all()


def _plain(value: Any) -> Hashable:
    return (type(value), value) if isinstance(value, _PLAIN) else (type(value),)


def _reference(value: Any) -> Callable[[], Any]:
    """A weak reference where there can be one."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
