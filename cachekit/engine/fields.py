"""The latents of a call as fields: [samples, channels, *space] with up to three axes of space (frames, rows, columns).

Tensors of images and videos are brought into this order; packed tokens are unpacked where shapes, sizes or position ids
among the arguments say how they lie, and are a line of tokens otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Fields = tuple[tuple[torch.Tensor, ...], ...]
"""Groups of samples; in each the fields of these samples, all with equally many samples."""

Fetch = Callable[[torch.Tensor], Any]

_CHANNELS = re.compile(r"(in|io|out|latent|num)_channels?")
_CHANNELS_LAST = re.compile(r"in_(\w+_)?dim")
_IDS = re.compile(r"(.*_)?(img|image|position|video|latent)_ids?")


@dataclass(frozen=True)
class Channels:
    """Numbers of channels that a model's config names, to tell the channels of a tensor from its other axes.

    Attributes:
        counts: of settings such as `in_channels`.
        last: of settings such as `in_visual_dim`: what a linear layer takes stands on the last axis. Clean frames and
            a mask may stand beside the latents, twice as many channels and one.
    """

    counts: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()

    @classmethod
    def of(cls, model: Any) -> Channels:
        """From the config of a diffusers model; without one nothing is known."""
        config = getattr(model, "config", None)
        settings = dict(config) if isinstance(config, Mapping) else {}
        counts = {name: value for name, value in settings.items() if type(value) is int and value > 0}
        last = {value for name, value in counts.items() if _CHANNELS_LAST.fullmatch(name)}
        return cls(
            frozenset(value for name, value in counts.items() if _CHANNELS.fullmatch(name)),
            frozenset((*last, *(2 * value + 1 for value in last))),
        )

    def axis(self, shape: Sequence[int]) -> int:
        """Which axis of a batched tensor holds the channels; the usual one where the config tells nothing."""
        if shape[-1] in self.last:
            return len(shape) - 1
        order = {3: (2, 1), 4: (1, 3), 5: (1, 2, 4)}[len(shape)]
        return next((axis for axis in order if shape[axis] in self.counts), order[0])


@dataclass(frozen=True)
class Segment:
    """Tokens that form one field: `tokens` in the order of the grid `shape`, a range where they lie in a row."""

    tokens: range | tuple[int, ...]
    shape: tuple[int, ...]

    def take(self, packed: torch.Tensor) -> torch.Tensor:
        """[samples, channels, *shape] from [samples, tokens, channels]."""
        if isinstance(self.tokens, range):
            chosen = packed[:, self.tokens.start : self.tokens.stop]
        else:
            chosen = packed[:, torch.tensor(self.tokens, device=packed.device)]
        field: torch.Tensor = chosen.movedim(-1, 1).unflatten(2, self.shape)
        return field


Plan = tuple[Segment, ...]


def latent_fields(
    arguments: Mapping[str, Any], names: Sequence[str], channels: Channels, plans: dict[str, Plan], fetch: Fetch
) -> Fields:
    """The noisy latents of a call as fields; nothing is copied that is in order already.

    A tensor is one group of samples; the elements of a list are one group each.

    Args:
        arguments: of the denoiser call, by name.
        names: which of them carry latents.
        channels: what the model's config tells.
        plans: how packed tokens lie, by argument; read where known and filled in otherwise.
        fetch: reads position ids back, at most once per argument that is not in `plans`.
    """
    whole: list[torch.Tensor] = []
    groups: list[tuple[torch.Tensor, ...]] = []
    for name in names:
        value = arguments.get(name)
        if isinstance(value, torch.Tensor):
            whole += _of_tensor(name, value, arguments, channels, plans, fetch)
        elif isinstance(value, (list, tuple)):
            groups += [fields for item in value if (fields := tuple(_of_item(item, channels)))]
    by_count: dict[int, list[torch.Tensor]] = {}
    for field in whole:
        by_count.setdefault(field.shape[0], []).append(field)
    return (*(tuple(fields) for fields in by_count.values()), *groups)


def _of_tensor(
    name: str,
    value: torch.Tensor,
    arguments: Mapping[str, Any],
    channels: Channels,
    plans: dict[str, Plan],
    fetch: Fetch,
) -> list[torch.Tensor]:
    if not value.is_floating_point() or value.numel() == 0 or value.ndim < 2:
        return []
    if value.ndim == 2:
        return [value]
    if value.ndim == 3 and channels.axis(value.shape) == 1:
        return [value]
    if value.ndim == 3 or value.ndim > 5:
        tokens = value.shape[1]
        if name not in plans:
            plans[name] = _plan(arguments, tokens, fetch)
        if value.ndim == 3 or plans[name] != _line(tokens):
            return [segment.take(value.flatten(2)) for segment in plans[name]]
        return [_arranged(item, channels) for item in value.unbind(1)]
    return [_arranged(value, channels)]


def _of_item(item: Any, channels: Channels) -> list[torch.Tensor]:
    """Fields of an element of a list of samples: a tensor without a batch, or a list of such tensors."""
    if isinstance(item, (list, tuple)):
        return [field for part in item for field in _of_item(part, channels)]
    if not isinstance(item, torch.Tensor) or not item.is_floating_point() or item.numel() == 0:
        return []
    if not 2 <= item.ndim <= 5:
        return []
    return [_arranged(item if item.ndim == 5 else item[None], channels)]


def _arranged(value: torch.Tensor, channels: Channels) -> torch.Tensor:
    """A batched tensor with its channels on axis 1."""
    return value if value.ndim < 3 or value.ndim > 5 else value.movedim(channels.axis(value.shape), 1)


# how packed tokens lie


def _line(tokens: int) -> Plan:
    return (Segment(range(tokens), (tokens,)),)


def _plan(arguments: Mapping[str, Any], tokens: int, fetch: Fetch) -> Plan:
    return (
        next((plan for value in arguments.values() if (plan := _from_shapes(value, tokens))), None)
        or _from_sizes(arguments, tokens)
        or _from_ids(arguments, tokens, fetch)
        or _line(tokens)
    )


def _from_shapes(value: Any, tokens: int) -> Plan | None:
    """From (frames, rows, columns) of every image, of one sample or the same for all."""
    if not isinstance(value, (list, tuple)) or not value:
        return None
    shapes = [_shape(item) for item in value]
    if all(shapes):
        alike = len(set(shapes)) == 1 and math.prod(shapes[0]) == tokens
        return _in_a_row(shapes[:1] if alike else shapes, tokens)
    plans = {_from_shapes(item, tokens) for item in value}
    return plans.pop() if len(plans) == 1 else None


def _shape(value: Any) -> tuple[int, ...]:
    """(frames, rows, columns), or nothing."""
    found = tuple(value) if isinstance(value, (list, tuple)) and len(value) == 3 else ()
    return found if all(type(size) is int and size > 0 for size in found) else ()


def _in_a_row(shapes: Sequence[tuple[int, ...]], tokens: int) -> Plan | None:
    """Grids one after the other; what is left at the end is padding."""
    segments, start = [], 0
    for shape in shapes:
        segments.append(Segment(range(start, start + math.prod(shape)), shape))
        start += math.prod(shape)
    return tuple(segments) if tokens // 2 < start <= tokens else None


def _from_sizes(arguments: Mapping[str, Any], tokens: int) -> Plan | None:
    """From the numbers `num_frames`, `height` and `width`."""
    sizes = [arguments.get(name) for name in ("num_frames", "height", "width")]
    shape = tuple(size for size in sizes if type(size) is int)
    return _in_a_row([shape], tokens) if shape and math.prod(shape) == tokens else None


def _from_ids(arguments: Mapping[str, Any], tokens: int, fetch: Fetch) -> Plan | None:
    """From the position of every token; where other tokens come first, those of the latents are the last ones."""
    for name, value in arguments.items():
        if not _IDS.fullmatch(name) or not isinstance(value, torch.Tensor) or value.ndim not in (2, 3):
            continue
        table = value[0] if value.ndim == 3 else value
        if not 2 <= table.shape[-1] <= 4 or table.shape[0] < tokens:
            continue
        rows = [tuple(row) for row in fetch(table[-tokens:])]
        return _grids(rows, images="position" not in name)
    return None


def _grids(rows: Sequence[tuple[float, ...]], images: bool) -> Plan | None:
    """Grids among the positions; with `images` the first number counts images and not frames."""
    runs: list[list[int]] = []
    for index, row in enumerate(rows):
        if not runs or (images and row[0] != rows[runs[-1][0]][0]):
            runs.append([])
        runs[-1].append(index)
    plan = [segment for run in runs if (segment := _grid(rows, run))]
    return tuple(plan) if len(plan) == len(runs) else None


def _grid(rows: Sequence[tuple[float, ...]], run: Sequence[int]) -> Segment | None:
    """One full grid; tokens at a position that was taken already are padding."""
    first = {rows[index]: index for index in reversed(run)}
    sizes = [len({row[axis] for row in first}) for axis in range(len(rows[0]))]
    shape = tuple(size for size in sizes if size > 1)[:3]
    if not shape or math.prod(sizes) != len(first) or math.prod(shape) != len(first):
        return None
    order = tuple(first[row] for row in sorted(first))
    whole = range(order[0], order[0] + len(order))
    return Segment(whole if order == tuple(whole) else order, shape)
