"""What strategies share that skip attention by its type: fields, their checks, and which modules a type means."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from torch import nn

from cachekit.engine.attention import KINDS, attention_kinds
from cachekit.errors import UnsupportedModelError
from cachekit.strategies.base import CacheConfig, checked_patterns, config_class


def _window(value: tuple[float, float]) -> tuple[float, float]:
    if not value[0] < value[1]:
        raise ValueError("give (start, end) with start < end, as noise levels from 0 (clean) to 1000 (noise)")
    return value


def _patterns(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, str) or not value:
        raise ValueError("give a tuple of regular expressions, or None to sort attention by what it is fed")
    checked_patterns(value)
    return tuple(value)


SkipRange = Annotated[int | None, Field(ge=1)]
Window = Annotated[tuple[float, float], AfterValidator(_window)]
Identifiers = Annotated[tuple[str, ...] | None, BeforeValidator(_patterns)]


@config_class
class AttentionConfig(CacheConfig):
    """What configs share that name fields after a type of attention: `spatial_attention_block_skip_range` and so on."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The types of attention that have a skip range."""
        return tuple(kind for kind in KINDS if self.of(kind, "block_skip_range") is not None)

    def of(self, kind: str, field: str) -> Any:
        """The field of one type of attention; None where the config has none."""
        return getattr(self, f"{kind}_attention_{field}", None)


def unlisted(theirs: type[Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of diffusers' config `theirs` as ours: its default identifiers stand for "every block", here None does."""
    defaults = {field.name: field.default for field in dataclasses.fields(theirs)}
    return {
        name: None if name.endswith("block_identifiers") and tuple(value) == defaults[name] else value
        for name, value in fields.items()
        if not name.startswith("_")
    }


def attention_modules(config: AttentionConfig, denoiser: nn.Module) -> dict[str, tuple[str, ...]]:
    """Type -> paths of the attention modules that a config skips.

    Raises:
        UnsupportedModelError: the model has no attention of a type that has a skip range.
    """
    known = attention_kinds(denoiser)
    named: dict[str, list[str]] = {}
    for kind in config.kinds:
        patterns = config.of(kind, "block_identifiers")
        if patterns is not None:
            taken = {path for paths in named.values() for path in paths}
            named[kind] = [path for path in _named(kind, patterns, known, config) if path not in taken]
    taken = {path for paths in named.values() for path in paths}
    chosen = {
        kind: tuple(named[kind]) if kind in named else tuple(p for p in known.get(kind, ()) if p not in taken)
        for kind in config.kinds
    }
    for kind, paths in chosen.items():
        if not paths:
            raise UnsupportedModelError(_missing(kind, known, config, denoiser))
    return chosen


def _named(
    kind: str, patterns: tuple[str, ...], known: dict[str, tuple[str, ...]], config: AttentionConfig
) -> list[str]:
    """Attention modules that identifiers find for one type.

    Those sorted into this type come first; others follow unless a type that has a skip range of its own wants them.
    Where none was sorted into it, the identifiers know better. Attention to the own and to another stream is only
    mixed when they find nothing else.
    """
    hits = {
        path: other
        for other, paths in known.items()
        for path in paths
        if any(re.search(pattern, path) for pattern in patterns)
    }
    fitting = {path: other for path, other in hits.items() if (other == "cross") == (kind == "cross")} or hits
    if kind in fitting.values():
        return [path for path, other in fitting.items() if other == kind or other not in config.kinds]
    return list(fitting)


def _missing(kind: str, known: dict[str, tuple[str, ...]], config: AttentionConfig, denoiser: nn.Module) -> str:
    name, field = type(denoiser).__name__, f"{kind}_attention_block_identifiers"
    if not known:
        return f"{name} has no attention module that projects queries, so there is nothing to broadcast"
    has = ", ".join(f"{other} ({len(paths)} modules, such as {paths[0]})" for other, paths in known.items())
    patterns = config.of(kind, "block_identifiers")
    if patterns is not None:
        return f"{field}={patterns} finds no attention that is left for it in {name}; it has {has}"
    return (
        f"{name} has no {kind} attention; it has {has}: leave {kind}_attention_block_skip_range out, or say with "
        f"{field} which modules are meant"
    )
