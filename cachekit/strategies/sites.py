"""Choosing a site in a denoiser, with an error that names the cure where there is none."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from cachekit.engine.discovery import find_attention, unwrap
from cachekit.engine.rules import ModulesSpec
from cachekit.errors import UnsupportedModelError


def attention_site(denoiser: nn.Module) -> ModulesSpec:
    """All attention modules."""
    found = find_attention(unwrap(denoiser))
    if not found:
        raise UnsupportedModelError(
            f"{type(denoiser).__name__} has no attention module that projects queries; use use_lite_mode=True (block "
            f"stack) or name the modules with cache_identifiers"
        )
    return ModulesSpec(tuple(found))


def named_site(denoiser: nn.Module, predicted: Iterable[str] | None, zeroed: Iterable[str] | None) -> ModulesSpec:
    """Modules whose path matches a regular expression in full; attention modules where none is given to predict."""
    core = unwrap(denoiser)
    zeros = _matching(core, zeroed or (), "skip_predict_identifiers")
    modules = list(find_attention(core)) if predicted is None else _matching(core, predicted, "cache_identifiers")
    inside = [path for path in modules if not any(path == zero or path.startswith(f"{zero}.") for zero in zeros)]
    if not inside:
        raise UnsupportedModelError(
            f"nothing of {type(denoiser).__name__} is left to predict: every module named by cache_identifiers lies "
            f"inside one named by skip_predict_identifiers, or there is no attention module; give cache_identifiers"
        )
    return ModulesSpec(tuple(inside), tuple(zeros))


def _matching(denoiser: nn.Module, patterns: Iterable[str], field: str) -> list[str]:
    paths = [path for path, _ in denoiser.named_modules() if path]
    found: dict[str, None] = {}
    for pattern in patterns:
        hits = [path for path in paths if re.fullmatch(pattern, path)]
        if not hits:
            sample = ", ".join(paths[:5])
            raise UnsupportedModelError(
                f"{field}: {pattern!r} matches no module of {type(denoiser).__name__} (paths look like {sample})"
            )
        found.update(dict.fromkeys(hits))
    return list(found)
