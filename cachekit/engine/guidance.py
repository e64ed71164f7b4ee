"""What a pipeline lets know about its guidance: whether it guides, and which half of a doubled batch is which."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cachekit.engine.binding import tensors_in
from cachekit.engine.clock import running_call
from cachekit.engine.halves import Half
from cachekit.engine.planes import Read

_PAIR = {"cond": "uncond", "uncond": "cond"}

_GUIDES = ("do_classifier_free_guidance", "_do_classifier_free_guidance", "apply_cfg", "do_cfg")
_EMPTY = ("negative", "uncond", "null")


@dataclass(frozen=True)
class PipelineGuidance:
    """What the pipeline call that is running says.

    Attributes:
        guides: True when it does classifier-free guidance; None when nothing tells (no pipeline).
        negatives: tensors that belong to the unconditional branch.
        size: height and width of what it makes; None when it does not say.
    """

    guides: bool | None = None
    negatives: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    size: tuple[float, float] | None = None

    @classmethod
    def now(cls) -> PipelineGuidance:
        """Of the pipeline whose call is running in this thread."""
        found = running_call(_is_telling)
        if found is None:
            return cls()
        pipeline, names = found
        negatives = tuple(
            tensor for name, value in names.items() if _is_empty(name) for tensor in tensors_in(value) if tensor.ndim
        )
        sides = names.get("height"), names.get("width")
        size = None if not all(isinstance(side, (int, float)) for side in sides) else sides
        return cls(_guides(pipeline, names), negatives, size)  # type: ignore[arg-type]


def partner_of(branch: str, given: Sequence[str] | None, known: Container[str]) -> str | None:
    """The branch that makes a guidance pair with this one; None when there is none, or it has not been seen.

    Args:
        branch: name of a branch.
        given: names that the user gave, in the order of the calls; two make a pair whatever they are.
        known: the other branches.
    """
    if given is not None and len(given) == 2 and branch in given:
        partner = given[1 - list(given).index(branch)]
    else:
        prefix = "pred_" * branch.startswith("pred_")
        name = branch.removeprefix("pred_")
        partner = prefix + _PAIR[name] if name in _PAIR else ""
    return partner if partner in known else None


def conditional_half(guidance: PipelineGuidance, arguments: Sequence[Any], rows: int, read: Read) -> Half | None:
    """The half of a doubled batch that is not made of the pipeline's own negative tensors; None when nothing tells."""
    negatives = sorted(guidance.negatives, key=torch.Tensor.numel, reverse=True)
    for first, second in _pairs(arguments, rows):
        for negative in negatives:
            is_first, is_second = (_same(negative, half, read) for half in (first, second))
            if is_first != is_second:
                return Half(1) if is_first else Half(0)
    return None


def _pairs(arguments: Sequence[Any], rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """First and second half of every argument that holds the batch."""
    for value in arguments:
        if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == rows:
            yield Half(0).take(value), Half(1).take(value)
        elif isinstance(value, (list, tuple)):
            if len(value) == rows and all(isinstance(item, torch.Tensor) for item in value):
                yield value[0], value[rows // 2]
            yield from _pairs(value, rows)


def _same(one: torch.Tensor, other: torch.Tensor, read: Read) -> bool:
    if one.shape == other.shape[1:]:
        other = other[0]
    if one.shape != other.shape:
        return False
    return bool(read((one.to(device=other.device, dtype=other.dtype) == other).all()))


def _is_telling(name: str) -> bool:
    return name in _GUIDES or name in ("guidance_scale", "height", "width") or _is_empty(name)


def _is_empty(name: str) -> bool:
    return name.startswith(_EMPTY) or name.endswith("_null")


def _guides(pipeline: Any, names: Mapping[str, Any]) -> bool | None:
    for value in (*(getattr(pipeline, name, None) for name in _GUIDES), *(names.get(name) for name in _GUIDES)):
        if isinstance(value, bool):
            return value
    scale = names.get("guidance_scale")
    return scale > 1 if isinstance(scale, (int, float)) else None
