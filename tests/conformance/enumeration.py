"""Every denoiser class of the installed diffusers, found by structure, so that a new class shows up by itself."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import typing

import diffusers.models
from diffusers.models.modeling_utils import LegacyModelMixin, ModelMixin
from torch import nn

LATENTS_LIKE = re.compile(r"^(x|sample|latents|hidden_states|bb_ca|.*_tokens)$")
TIME_LIKE = re.compile(r"^(t|(.*_)?timesteps?|(.*_)?time|timestep_ratio)$")
ABSTRACT = (ModelMixin, LegacyModelMixin)


@functools.cache
def _model_classes() -> tuple[type[nn.Module], ...]:
    """Every `ModelMixin` defined anywhere below `diffusers.models`, in the order of the modules."""
    found: dict[type[nn.Module], None] = {}
    for info in pkgutil.walk_packages(diffusers.models.__path__, "diffusers.models."):
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and issubclass(value, ModelMixin)
                and value not in ABSTRACT
                and value.__module__ == info.name
            ):
                found[value] = None
    return tuple(found)


def _predicts_from_time(cls: type[nn.Module]) -> bool:
    """Whether `forward` takes something like latents and something like a timestep."""
    names = list(inspect.signature(cls.forward).parameters)
    return any(map(LATENTS_LIKE.match, names)) and any(map(TIME_LIKE.match, names))


def _returns_a_sample_of_its_own(cls: type[nn.Module]) -> bool:
    """Whether the output class is defined beside `cls` and has a `sample`: a denoiser, not hints for one."""
    returns = inspect.signature(cls.forward, eval_str=True).return_annotation
    options = typing.get_args(returns) or (returns,)
    return any(
        getattr(option, "__module__", None) == cls.__module__ and "sample" in getattr(option, "__annotations__", {})
        for option in options
    )


def _is_control(cls: type[nn.Module]) -> bool:
    return ".controlnets." in cls.__module__ and not _returns_a_sample_of_its_own(cls)


def denoiser_classes() -> list[type[nn.Module]]:
    """Models that predict noise, velocity or data from latents and a timestep."""
    return [cls for cls in _model_classes() if _predicts_from_time(cls) and not _is_control(cls)]


def control_classes() -> list[type[nn.Module]]:
    """Control-nets: the same inputs, but they return hints for a denoiser."""
    return [cls for cls in _model_classes() if _predicts_from_time(cls) and _is_control(cls)]
