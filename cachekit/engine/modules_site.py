"""Site: the outputs of single modules, such as every attention of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cachekit.engine.binding import rebuild
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
        facts, newest = context.facts, context.history.newest
        self._entry = Entry(context.now.step, half=facts.runs or facts.keeps)
        self._answered = 0
        served = newest is None or newest.serves(facts.runs)
        self._reuse = context.decide(None, None if served else "the other half of the batch was computed last")

    def run(self, slot: tuple[str, bool], inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path, zeroed = slot
        count = self._calls.get(path, 0)
        self._calls[path] = count + 1
        if self._reuse:
            answer = self._answer(path, count)
            if answer is not None:
                self._answered += 1
                return answer
        output = inner(*args, **kwargs)
        if not self._reuse:
            self._keep(path, count, zeroed, output)
        return output

    def finish(self) -> Entry | None:
        newest = self._context.history.newest
        if not self._reuse:
            return self._entry if self._entry.values else None
        if newest is None or self._answered < len(newest.passive):
            raise StructureChangedError
        return None

    def _keep(self, path: str, count: int, zeroed: bool, output: Any) -> None:
        parts = floating_parts(output)
        form = kept_form(output, {} if zeroed else parts, storage_free=zeroed)
        self._entry.passive[path, count] = form
        if not zeroed:
            for key, part in parts.items():
                kept = part if self._context.facts.keeps is None else self._context.facts.keeps.take(part)
                self._entry.values[path, count, key] = self._context.storage.keep(kept.detach().clone())

    def _answer(self, path: str, count: int) -> Any | None:
        newest = self._context.history.newest
        if newest is None or (path, count) not in newest.passive:
            return None
        form = newest.passive[path, count]
        predicted: dict[Any, torch.Tensor | None] = {
            place[2]: self._context.predict(place)  # type: ignore[index]
            for place in newest.values
            if place[:2] == (path, count)  # type: ignore[index]
        }
        if form is None:
            return predicted[None]
        return _filled(form, predicted)


def _filled(form: Any, predicted: dict[Any, torch.Tensor | None]) -> Any:
    if isinstance(form, torch.Tensor):
        return form.clone()
    parts = {
        key: predicted.get(key, part) for key, part in (form.items() if isinstance(form, dict) else enumerate(form))
    }
    return rebuild(form, {key: part.clone() if isinstance(part, torch.Tensor) else part for key, part in parts.items()})
