"""Site: the whole denoiser. A skipped call runs nothing at all; what is kept are a few outputs of the model."""

from __future__ import annotations

from typing import Any

import torch

from cachekit.engine.binding import Path, fill_tensors, replace_tensors
from cachekit.engine.history import Entry
from cachekit.engine.hooks import Inner
from cachekit.engine.sites import PassContext, Site, SitePass, StructureChangedError


class DenoiserSite(Site):
    """Hooks nothing but the root. Works for every module, whatever is inside, compiled or not."""

    rank = 0
    is_whole = True

    def begin(self, branch: str, context: PassContext) -> DenoiserPass:
        return DenoiserPass(context)

    def describe(self) -> str:
        return "the whole denoiser"


class DenoiserPass(SitePass):
    """Keeps what the model returned, or returns a prediction in the same form."""

    def __init__(self, context: PassContext) -> None:
        self._context = context
        self._entry = Entry(context.now.step)
        self.replaces_model = context.decide(None)

    def around(self, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.replaces_model:
            return self._answer()
        output = inner(*args, **kwargs)
        self._entry.passive[None] = replace_tensors(output, self._keep)
        return output

    def finish(self) -> Entry | None:
        if self.replaces_model:
            return None
        return self._entry if self._entry.values else None

    def _keep(self, tensor: torch.Tensor, path: Path) -> Any:
        if not tensor.is_floating_point():
            return tensor.detach().clone()
        self._entry.values[path, tensor.dtype] = self._context.storage.keep(tensor.detach().clone())
        return tensor.dtype

    def _answer(self) -> Any:
        newest = self._context.history.newest
        if newest is None:
            raise StructureChangedError
        device = next((source.device for source in self._context.sources), None)

        def predicted(kept: Any, path: Path) -> torch.Tensor:
            if isinstance(kept, torch.Tensor):
                return kept.clone()
            prediction = self._context.predict((path, kept))
            if prediction is None:
                raise StructureChangedError
            return prediction.to(device=device, dtype=kept)

        return fill_tensors(newest.passive[None], predicted)
