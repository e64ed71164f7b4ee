"""Draws pictures one after the other with a pipeline that is loaded, and cached, once."""

from __future__ import annotations

import inspect
import time
from typing import Any

import torch

import cachekit
from cachekit.run.errors import RunError
from cachekit.run.images import encode
from cachekit.run.loading import load
from cachekit.run.settings import Picture, Settings

_BAD = (ValueError, TypeError, cachekit.CacheKitError)


class Painter:
    """One loaded pipeline.

    Args:
        settings: what to draw with.
        device: where.

    Raises:
        RunError: the pipeline or the cache cannot be used, or the pipeline takes no such argument.
    """

    def __init__(self, settings: Settings, device: str) -> None:
        config = settings.config()
        self._device = device
        self._pipe = load(settings.pipeline, device)
        self._arguments = _call_arguments(self._pipe, settings)
        try:
            if config is not None:
                cachekit.enable_cache(self._pipe, config, progress=False)
        except _BAD as error:
            raise RunError(str(error)) from None

    def paint(self, picture: Picture) -> bytes:
        """A picture as PNG, its settings inside. The noise is made on the CPU: the same on every device.

        Raises:
            RunError: the pipeline cannot be called like this, or gives no image.
        """
        started = time.perf_counter()
        generator = torch.Generator().manual_seed(picture.seed)
        try:
            output = self._pipe(prompt=picture.prompt, generator=generator, **self._arguments)
        except _BAD as error:
            raise RunError(f"{picture.prompt!r} cannot be drawn: {error}") from None
        images = getattr(output, "images", None)
        if not isinstance(images, list):
            raise RunError(f"{type(self._pipe).__name__} gives no images but {type(output).__name__}")
        return encode(images[0], picture.settings, self._work(time.perf_counter() - started))

    def _work(self, seconds: float) -> dict[str, Any]:
        """What the last picture took."""
        work = {"seconds": round(seconds, 3), "device": self._device, "versions": _versions()}
        stats = cachekit.stats(self._pipe)
        return {**work, "calls": stats.calls, "computed": stats.computed} if stats.all else work


def _versions() -> dict[str, str]:
    import diffusers

    return {"cachekit": cachekit.__version__, "diffusers": diffusers.__version__, "torch": str(torch.__version__)}


def _call_arguments(pipe: Any, settings: Settings) -> dict[str, Any]:
    """What the pipeline is called with besides prompt and generator."""
    known = inspect.signature(type(pipe).__call__).parameters
    wanted = {"num_inference_steps": settings.steps, "output_type": "pil"}
    wanted |= _guidance(pipe, known, settings.guidance) | settings.arguments
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())
    unknown = [name for name in ("prompt", "generator", *wanted) if name not in known and not takes_any]
    if unknown:
        raise RunError(f"{type(pipe).__name__} takes no {', '.join(unknown)}; it takes {', '.join(list(known)[1:])}")
    return wanted


def _guidance(pipe: Any, known: Any, strength: float | None) -> dict[str, Any]:
    """Guidance by the name that has an effect: without an embedding for it, only true CFG guides a Flux or Qwen."""
    if strength is None:
        return {}
    config = getattr(getattr(pipe, "transformer", None), "config", {})
    if "true_cfg_scale" in known and not config.get("guidance_embeds", False):
        return {"true_cfg_scale": strength, "negative_prompt": ""}
    return {"guidance_scale": strength}
