"""Site: the outputs of single modules, such as every attention of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from cachekit.engine.binding import Key, is_floating, rebuild, tensors_in
from cachekit.engine.history import Entry
from cachekit.engine.hooks import Inner
from cachekit.engine.rules import ModulesSpec
from cachekit.engine.sites import PassContext, Site, SitePass, StructureChangedError, floating_parts, kept_form


class ModulesSite(Site):
    """Hooks the modules of a :class:`ModulesSpec`; slots are (path, whether it is zeroed)."""

    rank = 2

    def __init__(self, spec: ModulesSpec, denoiser: nn.Module) -> None:
        super().__init__()
        zeroed = f", {len(spec.zeroed)} zeroed" if spec.zeroed else ""
        self._description = f"{len(spec.modules)} modules predicted{zeroed}"
        for path in spec.modules:
            self.attach(denoiser.get_submodule(path), (path, False))
        for path in spec.zeroed:
            self.attach(denoiser.get_submodule(path), (path, True))

    def begin(self, branch: str, context: PassContext) -> ModulesPass:
        return ModulesPass(context)

    def describe(self) -> str:
        return self._description


class ModulesPass(SitePass):
    """A forward pass in which module outputs are kept, or predicted. Places are (path, n-th call, output key)."""

    def __init__(self, context: PassContext) -> None:
        self._context = context
        self._calls: dict[str, int] = {}
        facts = context.facts
        if facts.discards:
            context.history.clear()
        newest = context.history.newest
        self._entry = Entry(context.now.step, half=facts.runs or facts.keeps)
        self._answered = 0
        served = newest is None or (newest.serves(facts.runs) and bool(newest.values))
        self._reuse = context.decide(None, None if served else "the last computed call was kept for other calls only")

    def run(self, slot: tuple[str, bool], inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path, zeroed = slot
        count = self._calls.get(path, 0)
        self._calls[path] = count + 1
        if self._reuse:
            answer = self._answer(path, count, _inputs(args, kwargs))
            if answer is not None:
                self._answered += 1
                return answer
        output = inner(*args, **kwargs)
        if not self._reuse:
            self._keep(path, count, zeroed, output, _inputs(args, kwargs))
        return output

    def will_run(self, slot: tuple[str, bool]) -> bool | None:
        path = slot[0]
        newest = self._context.history.newest
        kept = newest is not None and (path, self._calls.get(path, 0)) in newest.passive
        return not (self._reuse and kept)

    def finish(self) -> Entry | None:
        newest = self._context.history.newest
        if not self._reuse:
            return self._entry if self._entry.values or self._context.facts.discards else None
        if newest is None or self._answered < len(newest.passive):
            raise StructureChangedError
        return None

    def _keep(self, path: str, count: int, zeroed: bool, output: Any, inputs: Sequence[torch.Tensor]) -> None:
        if self._context.facts.discards:
            return
        parts = floating_parts(output)
        form = kept_form(output, {} if zeroed else parts, storage_free=zeroed)
        origins = {key: _Origin.of(part, inputs) for key, part in parts.items()}
        self._entry.passive[path, count] = _Kept(form, origins)
        if not zeroed:
            for key, part in parts.items():
                kept = part if self._context.facts.keeps is None else self._context.facts.keeps.take(part)
                self._entry.values[path, count, key] = self._context.storage.keep(kept.detach().clone())

    def _answer(self, path: str, count: int, inputs: Sequence[torch.Tensor]) -> Any | None:
        newest = self._context.history.newest
        kept: _Kept | None = None if newest is None else newest.passive.get((path, count))
        if newest is None or kept is None:
            return None
        predicted: dict[Key, torch.Tensor] = {}
        for key, origin in kept.origins.items():
            if (path, count, key) in newest.values:
                prediction = self._context.predict((path, count, key))
                if prediction is None or not origin.still_holds(prediction, inputs):
                    raise StructureChangedError
                predicted[key] = prediction.to(device=origin.device, dtype=origin.dtype)
        return predicted[None] if kept.form is None else _filled(kept.form, predicted)


@dataclass(frozen=True)
class _Origin:
    """Where a predicted part came from: its dtype and device, and which input had the same shape (None: no one)."""

    dtype: torch.dtype
    device: torch.device
    alike: int | None

    @classmethod
    def of(cls, part: torch.Tensor, inputs: Sequence[torch.Tensor]) -> _Origin:
        alike = next((index for index, tensor in enumerate(inputs) if tensor.shape == part.shape), None)
        return cls(part.dtype, part.device, alike)

    def still_holds(self, prediction: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
        """False when the input that had the shape of the result has another one now."""
        if self.alike is None:
            return True
        return self.alike < len(inputs) and inputs[self.alike].shape == prediction.shape


class _Kept(NamedTuple):
    """What is remembered of one module call besides its values; a tuple, so that tensors in it are counted."""

    form: Any
    origins: dict[Key, _Origin]


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [tensor for value in (*args, *kwargs.values()) for tensor in tensors_in(value) if is_floating(tensor)]


def _filled(form: Any, predicted: dict[Key, torch.Tensor]) -> Any:
    if isinstance(form, torch.Tensor):
        return form.clone()
    parts = {
        key: predicted.get(key, part) for key, part in (form.items() if isinstance(form, dict) else enumerate(form))
    }
    return rebuild(form, {key: part.clone() if isinstance(part, torch.Tensor) else part for key, part in parts.items()})
