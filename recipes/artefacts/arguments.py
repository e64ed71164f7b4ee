"""A denoiser's arguments as a flat list of tensors beside constants, so that two calls can be compared and replayed.

An artefact is a graph of tensors: everything else that a denoiser was called with is baked into it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from cachekit.engine.binding import bind
from cachekit.engine.discovery import timestep_names
from recipes.artefacts.errors import ArtefactError

Scalar = bool | int | float | str | None
Place = tuple[str | int, ...]
"""Where a value stands: the argument's name, then keys and positions."""
_SWITCH = "return_dict"


class TensorInput(BaseModel):
    """What an artefact wants at one place.

    Attributes:
        place: argument name, then keys and positions.
        shape: sizes of all dimensions.
        dtype: as torch names it, "float32".
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    place: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{label(self.place)} {self.shape} {self.dtype}"


class Constant(BaseModel):
    """A value that is part of the graph; an empty list or mapping stands for itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    place: tuple[str | int, ...]
    value: Scalar | list[Any] | dict[str, Any]


class Signature(BaseModel):
    """The calls that an artefact can serve."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    tensors: tuple[TensorInput, ...]
    constants: tuple[Constant, ...] = ()


@dataclass(frozen=True)
class FlatCall:
    """One call: tensors by place, constants by place."""

    tensors: dict[Place, torch.Tensor]
    constants: dict[Place, Any]

    def signature(self) -> Signature:
        return Signature(
            tensors=tuple(
                TensorInput(place=place, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))
                for place, tensor in self.tensors.items()
            ),
            constants=tuple(Constant(place=place, value=value) for place, value in self.constants.items()),
        )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def label(place: Place) -> str:
    return ".".join(map(str, place))


def flat_call(denoiser: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FlatCall:
    """Flatten the arguments of a call; arguments left at their default and `return_dict` are left out.

    Timesteps given as numbers or integers become float32 tensors, which is exact and makes a call independent of the
    sampler: some count in integers, others in floats.

    Raises:
        ArtefactError: an argument is neither a tensor, nor a plain value, nor made of these.
    """
    tensors: dict[Place, torch.Tensor] = {}
    constants: dict[Place, Any] = {}
    defaults, times = _defaults(type(denoiser).forward), timestep_names(denoiser)
    for name, value in bind(type(denoiser), tuple(args), kwargs).items():
        if name == _SWITCH or (name in defaults and value is defaults[name]):
            continue
        given = _as_time(value) if name in times else value
        for place, leaf in _leaves((name,), given):
            if isinstance(leaf, torch.Tensor):
                tensors[place] = leaf
            else:
                constants[place] = leaf
    return FlatCall(tensors, constants)


def nested(tensors: Mapping[Place, Any], constants: Mapping[Place, Any]) -> dict[str, Any]:
    """Keyword arguments again, from what :func:`flat_call` made of them; sequences come back as tuples."""
    tree: dict[Any, Any] = {}
    for place, value in (*tensors.items(), *constants.items()):
        node = tree
        for key in place[:-1]:
            node = node.setdefault(key, {})
        node[place[-1]] = value
    return {name: _with_sequences(value) for name, value in tree.items()}


def difference(wanted: Signature, given: Signature) -> str | None:
    """The first reason why a call does not fit, in words; None when it fits."""
    expected = {item.place: item for item in wanted.tensors}
    found = {item.place: item for item in given.tensors}
    for place, item in expected.items():
        other = found.get(place)
        if other is None:
            return f"{label(place)} is missing"
        if other != item:
            return f"it takes {item}, got {other.shape} {other.dtype}"
    for place in found:
        if place not in expected:
            return f"it takes no {label(place)}"
    fixed = {item.place: item.value for item in wanted.constants}
    values = {item.place: item.value for item in given.constants}
    for place in (*fixed, *values):
        if place not in values or place not in fixed:
            side = "without" if place in values else "with"
            return f"it was built {side} {label(place)}"
        if fixed[place] != values[place]:
            return f"it was built with {label(place)}={fixed[place]!r}, got {values[place]!r}"
    return None


@lru_cache(maxsize=256)
def _defaults(forward: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(forward).parameters.values()
    return {item.name: item.default for item in parameters if item.default is not inspect.Parameter.empty}


def _as_time(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return torch.tensor(float(value))
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        return value.to(torch.float32)
    return value


def _leaves(place: Place, value: Any) -> Iterator[tuple[Place, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves((*place, str(key)), item)
    elif isinstance(value, (list, tuple)) and len(value):
        for index, item in enumerate(value):
            yield from _leaves((*place, index), item)
    elif isinstance(value, (list, tuple)):
        yield place, []
    elif isinstance(value, Mapping):
        yield place, {}
    elif value is None or isinstance(value, (torch.Tensor, bool, int, float, str)):
        yield place, value
    else:
        raise ArtefactError(
            f"{label(place)} is a {type(value).__name__}; an artefact takes tensors and plain values. Leave it out of "
            "the call, or use torch.compile instead"
        )


def _with_sequences(node: Any) -> Any:
    if not isinstance(node, dict) or not node:
        return node
    values = {key: _with_sequences(value) for key, value in node.items()}
    if all(isinstance(key, int) for key in values):
        return tuple(values[index] for index in range(len(values)))
    return values
