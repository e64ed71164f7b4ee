"""Puts artefacts into a pipeline, and the denoiser back."""

from __future__ import annotations

import inspect
import os
from typing import Any

from torch import nn

import cachekit as ck
import offload
from recipes.artefacts.artefact import Artefact, config_of, load
from recipes.artefacts.errors import ArtefactError
from recipes.artefacts.standin import FixedDenoiser, standin
from recipes.artefacts.weights import fingerprint


class Installed:
    """Artefacts in force in a pipeline; as a context manager it puts the denoiser back at the end of the block."""

    def __init__(self, pipe: Any, component: str, module: FixedDenoiser, original: nn.Module | None) -> None:
        self.pipe, self.component, self.module = pipe, component, module
        self._original = original
        self._undone = False
        setattr(pipe, component, module)
        try:
            facts = _facts(pipe) if original is None else {}
        except BaseException:
            setattr(pipe, component, original)
            raise
        self._before = {name: vars(pipe)[name] for name in facts}
        vars(pipe).update(facts)

    def __repr__(self) -> str:
        return f"<Installed: {', '.join(str(item.manifest) for item in self.module.artefacts)}>"

    def undo(self) -> None:
        """Put back the very module that was there; doing it twice is fine.

        Raises:
            ArtefactError: the component has been replaced since.
        """
        if self._undone:
            return
        if getattr(self.pipe, self.component) is not self.module:
            raise ArtefactError(
                f"pipe.{self.component} has been replaced since the artefact was installed; it is left as it is"
            )
        setattr(self.pipe, self.component, self._original)
        vars(self.pipe).update(self._before)
        self._undone = True

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


def install(
    pipe: Any,
    *artefacts: Artefact | str | os.PathLike[str],
    fallback: bool = False,
    other_weights: bool = False,
) -> Installed:
    """Let a pipeline run on artefacts instead of its denoiser.

    Args:
        pipe: the pipeline; its component may be None (`from_pretrained(folder, unet=None)`), which saves its memory.
        *artefacts: artefacts or files of one component, one for each size or batch; the first that fits is used.
        fallback: run calls that no artefact was built for on the pipeline's own denoiser, and say so once.
        other_weights: accept artefacts that were built from other weights than the pipeline's own denoiser has.

    Returns:
        A handle whose `undo()` puts the denoiser back.

    Raises:
        ArtefactError: an artefact cannot be loaded, does not belong to this pipeline, or does not go with what is
            enabled. The pipeline is as it was.
    """
    if not artefacts:
        raise ArtefactError("name at least one artefact or file to install")
    loaded = [item if isinstance(item, Artefact) else load(item) for item in artefacts]
    first = loaded[0].manifest
    component = first.component
    for item in loaded[1:]:
        _check_same(loaded[0], item)
    if not hasattr(pipe, component):
        raise ArtefactError(f"{loaded[0].name} was built for a component {component!r}, which this pipeline has not")
    original = getattr(pipe, component)
    if original is None and fallback:
        raise ArtefactError(
            f"fallback=True needs the denoiser, and pipe.{component} is None; load the pipeline with it"
        )
    if original is not None:
        _check_original(pipe, component, original, loaded[0], other_weights)
    module = standin(loaded, original, fallback)
    for item in loaded:
        item.warm_up()
    return Installed(pipe, component, module, original)


def _facts(pipe: Any) -> dict[str, Any]:
    """What a pipeline notes about its components when it is made, where that differs without the denoiser.

    Stable Diffusion, for one, reads its default size from the UNet's config there.
    """
    parameters, parts = inspect.signature(type(pipe).__init__).parameters, pipe.components
    given = {name: value for name, value in pipe.config.items() if name in parameters and name not in parts}
    twin = type(pipe)(**given, **parts)
    now = vars(pipe)
    return {
        name: value
        for name, value in vars(twin).items()
        if name in now and isinstance(value, (bool, int, float)) and now[name] != value
    }


def _check_same(first: Artefact, other: Artefact) -> None:
    for field in ("component", "denoiser", "config", "weights", "device", "dtype"):
        mine, others = getattr(first.manifest, field), getattr(other.manifest, field)
        if mine != others:
            raise ArtefactError(
                f"{first.name} and {other.name} do not go together: their {field} differ; build both from one pipeline"
            )


def _check_original(pipe: Any, component: str, original: nn.Module, item: Artefact, other_weights: bool) -> None:
    if isinstance(original, FixedDenoiser):
        raise ArtefactError(f"pipe.{component} runs on an artefact already; call undo() on its handle first")
    if ck.is_cache_enabled(original):
        raise ArtefactError(
            f"a cache is enabled on pipe.{component}; call cachekit.disable_cache(pipe) before you install an artefact"
        )
    if offload.active(pipe) is not None or hasattr(original, "_hf_hook"):
        raise ArtefactError(
            "the pipeline is offloaded, and an artefact cannot be moved; call offload.disable(pipe) or "
            "pipe.remove_all_hooks() first"
        )
    theirs = config_of(original)
    if type(original).__name__ != item.manifest.denoiser or theirs != item.manifest.config:
        keys = sorted(
            key for key in {*theirs, *item.manifest.config} if theirs.get(key) != item.manifest.config.get(key)
        )
        raise ArtefactError(
            f"{item.name} was built from a {item.manifest.denoiser}, pipe.{component} is a {type(original).__name__} "
            f"with another {', '.join(keys[:5]) or 'config'}; build the artefact from this pipeline"
        )
    if not other_weights and fingerprint(original) != item.manifest.weights:
        raise ArtefactError(
            f"{item.name} holds other weights than pipe.{component} (another checkpoint, dtype or adapter); build it "
            "from this pipeline, or pass other_weights=True to draw with the weights of the artefact"
        )
