"""Halves of a doubled batch: the two guidance branches that one call computes side by side.

What is batched in the arguments of a call cannot be read off the shapes alone: position ids of two tokens look like a
batch of two. So a way of halving the arguments is a guess, and :func:`ways` lists the guesses, the most likely first;
whoever uses one has to try it on the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from cachekit.engine.binding import Path, is_floating, items, rebuild

T = TypeVar("T")

_MOST_WAYS = 12
_DEPTH = 4
_WHOLE, _EACH, _LIST = "whole", "each", "list"


@dataclass(frozen=True)
class Half:
    """One half of a doubled batch: 0 the first, 1 the second."""

    index: int

    @property
    def other(self) -> Half:
        return Half(1 - self.index)

    def take(self, tensor: torch.Tensor, axis: int = 0) -> torch.Tensor:
        """This half of a tensor (a view); one that cannot be halved is taken whole."""
        rows = tensor.shape[axis] if tensor.ndim > axis else 1
        return tensor if rows % 2 else tensor.narrow(axis, self.index * (rows // 2), rows // 2)

    def of_list(self, values: Sequence[Any]) -> list[Any]:
        """This half of a list with an element for each sample."""
        middle = len(values) // 2
        return list(values[middle:] if self.index else values[:middle])


@dataclass
class CallFacts:
    """What the sites of one call tell one another, from the root inwards.

    Attributes:
        runs: the half of the batch that the model is given; None for all of it.
        keeps: the half of what is computed that later calls can use; None for all of it.
        discards: nothing of what is computed further in can be used by a later call.
        refreshes: this call is computed so that others can be predicted from it.
    """

    runs: Half | None = None
    keeps: Half | None = None
    discards: bool = False
    refreshes: bool = False


Action = str | int


@dataclass(frozen=True)
class Way:
    """One way of halving the arguments of a call: what is done at each place; places that are not named stay whole."""

    actions: Mapping[Path, Action]

    def take(self, half: Half, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """One half of the arguments."""
        return {name: self._taken(half, value, (name,)) for name, value in arguments.items()}

    def _taken(self, half: Half, value: Any, path: Path) -> Any:
        action = self.actions.get(path, _WHOLE)
        if action == _WHOLE:
            return value
        if action == _EACH:
            return rebuild(value, {key: self._taken(half, item, (*path, key)) for key, item in items(value)})
        if action == _LIST:
            return type(value)(half.of_list(value))
        return half.take(value, int(action))


class _Question(NamedTuple):
    """What can be done at a place, the most likely first, and how unlikely it is that the first one is wrong."""

    choices: tuple[Action, ...]
    surety: int = 1


def ways(
    arguments: Mapping[str, Any], rows: int, certain: Collection[str]
) -> tuple[Hashable, Callable[[], Iterator[Way]]]:
    """How the arguments of a call on `rows` samples may be halved.

    Args:
        arguments: by name.
        rows: size of the doubled batch.
        certain: names of arguments that are known to hold the batch.

    Returns:
        A key that is the same for calls with the same question, and what makes the guesses, the most likely first.
    """
    questions: dict[Path, _Question] = {}
    for name, value in arguments.items():
        if name in certain and value is not None:
            questions[(name,)] = _Question((_LIST if isinstance(value, list) else 0,))
        else:
            _ask((name,), value, rows, questions, _DEPTH)
    groups: dict[tuple[Any, int, _Question], list[Path]] = {}
    for path, question in questions.items():
        groups.setdefault((path[0], len(path), question), []).append(path)
    return tuple(groups), partial(_guesses, groups)


def _guesses(groups: Mapping[tuple[Any, int, _Question], list[Path]]) -> Iterator[Way]:
    """The likeliest way first; then those that do something else at up to three places, the least sure ones first."""
    likely = {path: question.choices[0] for (_, _, question), paths in groups.items() for path in paths}
    changes = [
        (position * question.surety, paths, action)
        for (_, _, question), paths in groups.items()
        for position, action in enumerate(question.choices)
        if position
    ]
    chosen = [combination for count in range(4) for combination in itertools.combinations(changes, count)]
    for combination in sorted(chosen, key=lambda items: sum(item[0] for item in items))[:_MOST_WAYS]:
        actions = {**likely, **{path: action for _, paths, action in combination for path in paths}}
        yield Way({path: action for path, action in actions.items() if action != _WHOLE})


def _ask(path: Path, value: Any, rows: int, questions: dict[Path, _Question], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        questions[path] = _axes(value, rows)
    elif isinstance(value, Mapping) and depth:
        questions[path] = _Question((_EACH,))
        for key, item in value.items():
            _ask((*path, key), item, rows, questions, depth - 1)
    elif isinstance(value, (list, tuple)) and depth:
        for index, item in enumerate(value):
            _ask((*path, index), item, rows, questions, depth - 1)
        batched = any(isinstance(item, torch.Tensor) and item.ndim and item.shape[0] == rows for item in value)
        if len(value) != rows:
            questions[path] = _Question((_EACH,))
        else:
            likely_each = batched or isinstance(value, tuple)
            questions[path] = _Question((_EACH, _LIST) if likely_each else (_LIST, _EACH))


def _axes(tensor: torch.Tensor, rows: int) -> _Question:
    """The batch stands first, or first together with something else (frames), or (lists of layers) second.

    Counts and position ids are what is easily mistaken for a batch.
    """
    if not tensor.ndim:
        return _Question((_WHOLE,))
    if tensor.shape[0] == rows:
        surety = 1 if tensor.ndim == 1 and not tensor.is_floating_point() else min(tensor.ndim + 1, 5)
        return _Question((0, _WHOLE), surety)
    second: tuple[Action, ...] = (1,) if tensor.ndim > 1 and tensor.shape[1] == rows else ()
    return _Question((_WHOLE, 0, *second) if tensor.shape[0] % rows == 0 else (_WHOLE, *second))


def parts_of(output: Any, depth: int = _DEPTH) -> dict[Path, torch.Tensor]:
    """Place -> floating tensor of a nested result."""
    return dict(_parts(output, (), depth))


def _parts(value: Any, path: Path, depth: int) -> Iterator[tuple[Path, torch.Tensor]]:
    if is_floating(value):
        yield path, value
    elif isinstance(value, (Mapping, list, tuple)) and depth:
        for key, item in items(value):
            yield from _parts(item, (*path, key), depth - 1)


def halves_of(output: Any, rows: int, listed: bool) -> dict[Path, tuple[torch.Tensor, torch.Tensor]]:
    """Place in the result of half a batch -> both halves, from the result of the whole one.

    Args:
        output: result of a call on `rows` samples; tensors are halved along their first axis.
        rows: size of the doubled batch.
        listed: samples are elements of lists, so lists of `rows` elements are halved as lists.
    """
    return dict(_halves(output, rows, listed, (), _DEPTH))


def _halves(
    value: Any, rows: int, listed: bool, path: Path, depth: int
) -> Iterator[tuple[Path, tuple[torch.Tensor, torch.Tensor]]]:
    if is_floating(value):
        if value.ndim and value.shape[0] == rows:
            yield path, (Half(0).take(value), Half(1).take(value))
    elif listed and isinstance(value, list) and len(value) == rows and all(is_floating(item) for item in value):
        for index, pair in enumerate(zip(Half(0).of_list(value), Half(1).of_list(value), strict=True)):
            yield (*path, index), pair
    elif isinstance(value, (Mapping, list, tuple)) and depth:
        for key, item in items(value):
            yield from _halves(item, rows, listed, (*path, key), depth - 1)


def joined(output: Any, predicted: Mapping[Path, torch.Tensor], computed: Half, listed: bool, path: Path = ()) -> Any:
    """The result of a whole batch from that of its half `computed` and the prediction of the other.

    The opposite of :func:`halves_of`; parts without a prediction stay as they are.
    """
    if is_floating(output):
        if path not in predicted:
            return output
        return torch.cat(_ordered(output, predicted[path], computed))
    if not isinstance(output, (Mapping, list, tuple)):
        return output
    places = [(*path, key) for key, _ in items(output)]
    if listed and isinstance(output, list) and output and all(place in predicted for place in places):
        first, second = _ordered(output, [predicted[place] for place in places], computed)
        return [*first, *second]
    parts = {key: joined(item, predicted, computed, listed, (*path, key)) for key, item in items(output)}
    return rebuild(output, parts)


def _ordered(computed: T, predicted: T, half: Half) -> list[T]:
    return [predicted, computed] if half.index else [computed, predicted]
