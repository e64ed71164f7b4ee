"""The picture inside a latent tensor: which axes are height and width, also where it is packed into tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cachekit.engine.binding import items

Read = Callable[[torch.Tensor], float]

_SIZES = ("num_frames", "height", "width")
_DEPTH = 4


@dataclass(frozen=True)
class Planes:
    """How a tensor is seen as planes: the last two axes are height and width, all others count planes.

    Attributes:
        grid: sizes over which a token axis is laid out, slowest first; () for tensors with four and more axes, which
            end in height and width whatever comes before (BCHW, BCFHW, BFCHW).
        axis: the token axis, counted from the end.
    """

    grid: tuple[int, ...] = ()
    axis: int = -2

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` as `[..., height, width]`."""
        if not self.grid:
            return tensor
        moved = tensor.movedim(self.axis, -1)
        sizes = (1, *self.grid) if len(self.grid) == 1 else self.grid
        return moved.reshape(*moved.shape[:-1], *sizes)

    def back(self, planes: torch.Tensor) -> torch.Tensor:
        """The opposite of :meth:`see`."""
        if not self.grid:
            return planes
        sizes = max(len(self.grid), 2)
        return planes.flatten(-sizes).movedim(-1, self.axis)

    @property
    def is_flat(self) -> bool:
        """True when tokens stand in one row because nothing tells how they are laid out."""
        return len(self.grid) == 1


def planes_of(
    tensor: torch.Tensor,
    arguments: Mapping[str, Any],
    size: tuple[float, float] | None,
    read: Read,
) -> Planes:
    """Where height and width are in a tensor like the latents.

    Tokens are laid out by, in this order: numbers called `height` and `width` (and `num_frames`) or shapes among the
    arguments, position ids, the aspect ratio of the pipeline. Failing that they count as one row.

    Args:
        tensor: `[..., height, width]` with four axes or more, or `[batch, tokens, channels]`.
        arguments: of the denoiser call.
        size: height and width of what the pipeline makes, in any unit.
        read: reads one number back from the device; a few are needed for position ids.
    """
    if tensor.ndim >= 4:
        return Planes()
    if tensor.ndim < 2:
        return Planes(tuple(tensor.shape), -1)
    tokens = tensor.shape[-2]
    grid = _named(arguments, tokens) or _shapes(arguments, tokens) or _ids(arguments, tokens, read)
    grid = grid or _proportions(tokens, size)
    if grid is not None:
        return Planes(grid)
    axis = -2 if tokens >= tensor.shape[-1] else -1
    return Planes((tensor.shape[axis],), axis)


def _named(arguments: Mapping[str, Any], tokens: int) -> tuple[int, ...] | None:
    numbers = tuple(arguments[name] for name in _SIZES if _is_count(arguments.get(name)))
    return numbers if len(numbers) > 1 and math.prod(numbers) == tokens else None


def _shapes(arguments: Mapping[str, Any], tokens: int) -> tuple[int, ...] | None:
    found = (shape for value in arguments.values() for shape in _number_tuples(value, _DEPTH))
    return next((shape for shape in found if math.prod(shape) == tokens), None)


def _number_tuples(value: Any, depth: int) -> Iterator[tuple[int, ...]]:
    if not isinstance(value, (list, tuple)) or not depth:
        return
    if 2 <= len(value) <= 3 and all(_is_count(item) for item in value):
        yield tuple(value)
    for _, item in items(value):
        yield from _number_tuples(item, depth - 1)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _ids(arguments: Mapping[str, Any], tokens: int, read: Read) -> tuple[int, ...] | None:
    """Position ids `[tokens, axes]` or `[batch, tokens, axes]` that count through a full grid, last axis fastest."""
    for value in arguments.values():
        if not isinstance(value, torch.Tensor) or value.ndim not in (2, 3) or not 2 <= value.shape[-1] <= 4:
            continue
        ids = value[0] if value.ndim == 3 else value
        if len(ids) != tokens or ids.is_complex():
            continue
        grid = [int(read(column.max() - column.min())) + 1 for column in ids.unbind(-1)]
        if math.prod(grid) == tokens and len([count for count in grid if count > 1]) > 1:
            return _compact(grid)
    return None


def _compact(grid: Sequence[int]) -> tuple[int, ...]:
    """Without axes of one entry, but never less than two."""
    sizes = [count for count in grid if count > 1]
    return tuple(sizes)


def _proportions(tokens: int, size: tuple[float, float] | None) -> tuple[int, ...] | None:
    if size is None or not min(size) > 0:
        return None
    height = round(math.sqrt(tokens * size[0] / size[1]))
    if not height or tokens % height:
        return None
    width = tokens // height
    return (height, width) if abs(height * size[1] - width * size[0]) < max(size) else None
