"""For own models: caching as methods, as diffusers' models have it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from cachekit import api


class CacheMixin:
    """Gives an `nn.Module` the methods of diffusers' class of the same name. It adds no attributes and no state.

    Modules without it are cached just as well: `cachekit.enable_cache(model, config)`.
    """

    def enable_cache(self, config: api.Configs, **options: Any) -> api.Handle:
        """Cache this model; arguments, result and errors are those of :func:`cachekit.enable_cache`."""
        return api.enable_cache(self, config, **options)

    def disable_cache(self, strategy: str | None = None) -> None:
        """Take one cache off this model, or all; no cache is no error."""
        api.disable_cache(self, strategy)

    @property
    def is_cache_enabled(self) -> bool:
        """True when this model is cached."""
        return api.is_cache_enabled(self)

    def cache_context(self, name: str, **position: Any) -> AbstractContextManager[None]:
        """Name the guidance branch of the calls inside, as :func:`cachekit.cache_context` does.

        Args:
            name: "cond", "uncond" or any other name.
            **position: the step, timestep and so on that diffusers' method takes; the clock needs none of them.
        """
        return api.cache_context(self, name)
