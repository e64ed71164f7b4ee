"""Models that keep a key/value cache of their own: a call that fills it must run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_READING = ("cached", "read", "inject")


def fills_own_cache(arguments: Mapping[str, Any]) -> bool:
    """True when a denoiser call writes into a `kv_cache` argument (Flux2, Qwen-Image 2.1, GLM, AnyFlow, ...).

    Recognised by the argument's name; calls that say that they only read are let through.
    """
    caches = [value for name, value in arguments.items() if name.startswith("kv_cache") and value is not None]
    modes = [value if isinstance(value, str) else getattr(value, "mode", None) for value in caches]
    fills = [value.get("is_cache_step") for value in caches if isinstance(value, Mapping)]
    return bool(caches) and not any(mode in _READING for mode in modes) and False not in fills
