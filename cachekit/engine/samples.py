"""Samples of a batch that decide separately: those that compute are gathered, the others reuse, results are joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch

from cachekit.engine.binding import items, rebuild, replace_tensors, tensors_in
from cachekit.engine.history import Entry
from cachekit.engine.sites import StructureChangedError

_RELATIVE = 0.05
_ROUNDINGS = 1


class CannotSplitError(StructureChangedError):
    """The samples of a batch cannot be computed one without the other; says why."""


def batch_of(arguments: Mapping[str, Any], latents: Iterable[str]) -> int | None:
    """Number of samples in a call: that of a list of latents, else their first dimension. None where unclear.

    Latents of two dimensions may be tokens of one packed sample, so they do not tell.
    """
    given = [arguments[name] for name in latents if arguments.get(name) is not None]
    sizes = {len(value) if isinstance(value, (list, tuple)) else _first(value) for value in given}
    return sizes.pop() if len(sizes) == 1 else None


def one_sample(arguments: Mapping[str, Any], latents: Iterable[str], index: int) -> dict[str, Any]:
    """The arguments of a call with the latents of one sample."""
    given = [name for name in latents if arguments.get(name) is not None]
    return {**arguments, **{name: arguments[name][index : index + 1] for name in given}}


def rows_of(entry: Entry, count: int) -> list[Entry] | None:
    """One entry a sample, each with memory of its own; None when a tensor has no dimension for the samples.

    The given entry is emptied on the way, so that not everything is held twice.
    """
    if any(not tensor.ndim or tensor.shape[0] != count for tensor in entry.tensors()):
        return None
    rows = [Entry(entry.step, primary=entry.primary) for _ in range(count)]
    for place in list(entry.values):
        whole = entry.values.pop(place)
        for index, row in enumerate(rows):
            row.values[place] = _row(index, whole)
    for index, row in enumerate(rows):
        row.passive = {place: _mapped(form, partial(_row, index)) for place, form in entry.passive.items()}
        row.signal = None if entry.signal is None else _row(index, entry.signal)
    return rows


def joined(forms: Sequence[Any]) -> Any:
    """Nested results of equal form, one after the other along the first dimension."""
    first = forms[0]
    if len(forms) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(tuple(forms))
    if isinstance(first, (tuple, list, Mapping)):
        columns = zip(*(items(form) for form in forms), strict=True)
        return rebuild(first, {column[0][0]: joined([value for _, value in column]) for column in columns})
    return first


class Split:
    """A batch in two groups: samples that compute, and samples that reuse. Runs of neighbours are cut out as views.

    Args:
        reused: for each sample whether it reuses.
    """

    def __init__(self, reused: Sequence[bool]) -> None:
        self._size = len(reused)
        self._runs = [(key, len(list(group))) for key, group in groupby(reused)]

    def part(self, value: Any, reused: bool) -> Any:
        """The samples of one group in a nested argument; what has another first dimension is handed on."""
        return _mapped(value, lambda tensor: self._rows(tensor, reused))

    def join(self, computed: Any, reused: Any) -> Any:
        """A result of all samples from those of both groups.

        Raises:
            CannotSplitError: a result has no dimension for the samples.
        """
        if isinstance(computed, torch.Tensor):
            groups = {False: computed, True: reused}
            counts = {key: sum(length for other, length in self._runs if other is key) for key in groups}
            if any(not groups[key].ndim or groups[key].shape[0] != count for key, count in counts.items()):
                raise CannotSplitError("a block returns a tensor that has no dimension for the samples of the batch")
            pieces, offsets = [], {False: 0, True: 0}
            for key, length in self._runs:
                pieces.append(groups[key].narrow(0, offsets[key], length))
                offsets[key] += length
            return torch.cat(pieces)
        if isinstance(computed, (tuple, list, Mapping)):
            others = dict(items(reused))
            return rebuild(computed, {key: self.join(part, others[key]) for key, part in items(computed)})
        return computed

    def error(self, whole: Any, part: Any, before: Any) -> torch.Tensor:
        """How far the computed group is from those samples of a computation of all, over what rounding explains.

        Above 1 the block mixes samples, or an argument was cut that should not have been. `before` are the arguments
        of the block: what changed them counts, not how large they are. Samples that hold NaN tell nothing; when all
        do, the result is NaN.
        """
        worst = []
        known = [tensor.float() for tensor in tensors_in(before) if tensor.is_floating_point()]
        for a, b in zip(tensors_in(self.part(whole, False)), tensors_in(part), strict=True):
            if a.shape != b.shape:
                raise CannotSplitError("a block returns other shapes when it is given a part of the batch")
            if a.is_floating_point():
                eps, a, b = torch.finfo(a.dtype).eps, a.float(), b.float()
                size = _norms(a)
                changes = torch.stack([size, *(_norms(a - other) for other in known if other.shape == a.shape)])
                bound = _RELATIVE * changes.amin(dim=0) + _ROUNDINGS * eps * size
                errors = (_norms(a - b) / bound.clamp_min(1e-30)).nan_to_num(torch.inf)
                tells = size.isfinite()
                worst.append(torch.where(tells.any(), torch.where(tells, errors, 0.0).max(), torch.nan))
        return torch.stack(worst).max() if worst else torch.zeros(())

    def _rows(self, tensor: torch.Tensor, reused: bool) -> torch.Tensor:
        if not tensor.ndim or tensor.shape[0] != self._size:
            return tensor
        pieces, start = [], 0
        for key, length in self._runs:
            if key is reused:
                pieces.append(tensor.narrow(0, start, length))
            start += length
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def copied(value: Any) -> Any:
    """A nested argument whose tensors can be written into."""
    return _mapped(value, torch.Tensor.clone)


def _norms(tensor: torch.Tensor) -> torch.Tensor:
    """Norm of each sample."""
    norms: torch.Tensor = torch.linalg.vector_norm(tensor.reshape(len(tensor), -1), dim=1)
    return norms


def _first(value: Any) -> int | None:
    return int(value.shape[0]) if isinstance(value, torch.Tensor) and value.ndim > 2 else None


def _row(index: int, tensor: torch.Tensor) -> torch.Tensor:
    """One sample, without the rest of the tensor that it was cut from."""
    row = tensor[index : index + 1]
    return row.clone() if row.untyped_storage().nbytes() > row.numel() * row.element_size() else row


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A nested value with `function` applied to its tensors."""
    return replace_tensors(value, lambda tensor, _: function(tensor))
