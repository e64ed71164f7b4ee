"""Pyramid Attention Broadcast: attention outputs are handed on to the next steps, each type at its own rate.

Method: Zhao et al., "Real-Time Video Generation with Pyramid Attention Broadcast" (2024). In the middle of a run the
attention outputs of neighbouring steps differ little: cross attention least, then temporal, then spatial. With n the
skip range of a type and s its last computed step, step t is reused when t - s < n and its noise level lies inside the
window. Blocks run, so the model still reacts to the latents; what is saved is attention. Each guidance branch is handed
its own results.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Annotated, Any

import diffusers
from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from torch import nn

from cachekit.engine.attention import KINDS, attention_kinds
from cachekit.engine.rules import Guards, ModulesSpec, Rule
from cachekit.errors import UnsupportedModelError
from cachekit.strategies.base import CacheConfig, config_class, strategy
from cachekit.strategies.gates import WindowGate
from cachekit.strategies.predictors import Reuse


def _window(value: tuple[float, float]) -> tuple[float, float]:
    if not value[0] < value[1]:
        raise ValueError("give (start, end) with start < end, as noise levels from 0 (clean) to 1000 (noise)")
    return value


def _patterns(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, str) or not value:
        raise ValueError("give a tuple of regular expressions, or None to sort attention by what it is fed")
    for pattern in value:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(f"{pattern!r} is not a regular expression ({error})") from None
    return tuple(value)


SkipRange = Annotated[int | None, Field(ge=1)]
Window = Annotated[tuple[float, float], AfterValidator(_window)]
Identifiers = Annotated[tuple[str, ...] | None, BeforeValidator(_patterns)]


@config_class
class PyramidAttentionBroadcastConfig(CacheConfig):
    """Config of Pyramid Attention Broadcast. At least one skip range has to be set; types without one compute.

    Args:
        spatial_attention_block_skip_range: compute attention over the own stream (joint image and text included) every
            n-th step inside the window; 1 never skips, 2 is usual.
        temporal_attention_block_skip_range: the same for attention along the frames; 3 or 4.
        cross_attention_block_skip_range: the same for attention to another stream, such as the prompt; 5 or 6.
        spatial_attention_timestep_skip_range: the window (start, end): steps whose noise level lies between the two may
            reuse. The scale goes from 0 (clean) to 1000 (noise); timesteps and sigmas that count from 0 to 1, or that
            rise during sampling, are converted.
        temporal_attention_timestep_skip_range: the same for temporal attention.
        cross_attention_timestep_skip_range: the same for cross attention.
        spatial_attention_block_identifiers: regular expressions searched in the paths of attention modules; those found
            are this type. None sorts modules by what they are fed.
        temporal_attention_block_identifiers: the same for temporal attention.
        cross_attention_block_identifiers: the same for cross attention.
        current_timestep_callback: returns the current noise level, compared with the windows as it is. Not needed: the
            engine knows it.
    """

    spatial_attention_block_skip_range: SkipRange = None
    temporal_attention_block_skip_range: SkipRange = None
    cross_attention_block_skip_range: SkipRange = None
    spatial_attention_timestep_skip_range: Window = (100, 800)
    temporal_attention_timestep_skip_range: Window = (100, 800)
    cross_attention_timestep_skip_range: Window = (100, 800)
    spatial_attention_block_identifiers: Identifiers = None
    temporal_attention_block_identifiers: Identifiers = None
    cross_attention_block_identifiers: Identifiers = None
    current_timestep_callback: Callable[[], Any] | None = None

    @model_validator(mode="after")
    def _needs_a_range(self) -> PyramidAttentionBroadcastConfig:
        if not self.kinds:
            fields = ", ".join(f"{kind}_attention_block_skip_range" for kind in KINDS)
            raise ValueError(f"nothing would be reused: set at least one of {fields} (2 for every second step)")
        return self

    @property
    def kinds(self) -> tuple[str, ...]:
        """The types of attention that have a skip range."""
        return tuple(kind for kind in KINDS if self.of(kind, "block_skip_range") is not None)

    def of(self, kind: str, field: str) -> Any:
        """The field of one type of attention."""
        return getattr(self, f"{kind}_attention_{field}")


def _from_diffusers(fields: dict[str, Any]) -> dict[str, Any]:
    """diffusers' default identifiers stand for "every block"; here None does."""
    defaults = {field.name: field.default for field in dataclasses.fields(diffusers.PyramidAttentionBroadcastConfig)}
    return {
        name: None if name.endswith("_identifiers") and tuple(value) == defaults[name] else value
        for name, value in fields.items()
    }


def _examples() -> dict[str, CacheConfig]:
    return {
        "": PyramidAttentionBroadcastConfig(spatial_attention_block_skip_range=2),
        "temporal": PyramidAttentionBroadcastConfig(temporal_attention_block_skip_range=4),
        "cross": PyramidAttentionBroadcastConfig(cross_attention_block_skip_range=6),
    }


@strategy("pab", PyramidAttentionBroadcastConfig, translate=_from_diffusers, examples=_examples)
def pab(config: PyramidAttentionBroadcastConfig, denoiser: nn.Module) -> list[Rule]:
    """One rule for each type of attention: fixed interval inside the window, last output."""
    return [
        Rule(
            ModulesSpec(modules),
            WindowGate(
                config.of(kind, "block_skip_range"),
                config.of(kind, "timestep_skip_range"),
                config.current_timestep_callback,
            ),
            Reuse(),
            Guards(),
            config.storage,
            name=f"{kind} attention",
        )
        for kind, modules in attention_modules(config, denoiser).items()
    ]


def attention_modules(config: PyramidAttentionBroadcastConfig, denoiser: nn.Module) -> dict[str, tuple[str, ...]]:
    """Type -> paths of the attention modules that a config broadcasts.

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
    kind: str, patterns: tuple[str, ...], known: dict[str, tuple[str, ...]], config: PyramidAttentionBroadcastConfig
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


def _missing(
    kind: str, known: dict[str, tuple[str, ...]], config: PyramidAttentionBroadcastConfig, denoiser: nn.Module
) -> str:
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
