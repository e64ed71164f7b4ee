"""Labels follow arguments through operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cachekit.engine.dataflow import SOURCE, Dataflow, tensors_of

LATENTS, TEXT, MASK = torch.ones(2, 3), torch.ones(2, 3), torch.ones(3, dtype=torch.int64)


def labels(function: Callable[..., Any], known: tuple[Tensor, ...] = ()) -> tuple[bool, frozenset[str]]:
    """Whether the latents reach the result of `function(latents, text, mask)`, and which arguments do."""
    latents, text, mask = LATENTS.clone(), TEXT.clone(), MASK.clone()
    flow = Dataflow([latents], {"text": text, "mask": mask}, known)
    with torch.no_grad(), flow:
        found = flow.labels(function(latents, text, mask))
    return bool(found & SOURCE), flow.named(found)


def written(latents: Tensor, text: Tensor, mask: Tensor) -> Tensor:
    text[0] = latents[1]
    return text


def through_a_number(latents: Tensor, text: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(3) if latents.sum() > 100 else torch.full((3,), 2.0)


UNFILLED = torch.empty(3)
CASES: dict[str, tuple[Callable[..., Any], bool, set[str]]] = {
    "one argument": (lambda x, t, m: t * 2, False, {"text"}),
    "two arguments": (lambda x, t, m: t * m, False, {"text", "mask"}),
    "the latents": (lambda x, t, m: t * 2 + x, True, {"text"}),
    "a view of them": (lambda x, t, m: x[1:].T, True, set()),
    "written into": (written, True, {"text"}),
    "only their form": (lambda x, t, m: torch.zeros_like(x) + t, False, {"text"}),
    "their form on their device": (lambda x, t, m: t + x.new_zeros(x.shape), False, {"text"}),
    "a number read back": (through_a_number, True, set()),
    "a length read back": (lambda x, t, m: torch.arange(int(m.sum())), False, {"mask"}),
    "a Python number": (lambda x, t, m: t * torch.tensor(2.0), False, {"text"}),
    "random numbers": (lambda x, t, m: t + torch.randn(3), True, {"text"}),
    "dropout in training": (lambda x, t, m: torch.dropout(t, 0.5, True), True, {"text"}),
    "dropout of nothing": (lambda x, t, m: torch.dropout(t, 0.5, False), False, {"text"}),
    "memory that something else fills": (lambda x, t, m: t + torch.empty(3), True, {"text"}),
    "memory of unknown origin": (lambda x, t, m: t + UNFILLED, True, {"text"}),
}


@pytest.mark.parametrize(("function", "reached", "names"), CASES.values(), ids=CASES)
def test_labels(function: Callable[..., Any], reached: bool, names: set[str]) -> None:
    assert labels(function) == (reached, frozenset(names))


def test_inference_mode_hides_nothing() -> None:
    with torch.inference_mode():
        assert labels(lambda x, t, m: nn.functional.linear(t, x)) == (True, frozenset({"text"}))
        assert labels(through_a_number)[0]


def test_weights_are_known_wherever_they_hang() -> None:
    class Holder:
        def __init__(self, tensor: Tensor) -> None:
            self.tables = {"cos": [tensor]}

    model = nn.Linear(3, 3)
    model.register_buffer("scale", torch.ones(3))
    model.hook = Holder(torch.ones(3))  # type: ignore[assignment]
    known = tuple(tensors_of(model))
    assert len(known) == 4
    assert labels(lambda x, t, m: t + model.hook.tables["cos"][0], known) == (False, frozenset({"text"}))  # type: ignore[union-attr,index,operator]


def test_a_module_call_that_writes_into_something_older_is_not_pure() -> None:
    flow, buffer = Dataflow([], {"text": TEXT}, [MASK]), torch.zeros(3)
    with torch.no_grad(), flow:
        outer = flow.enter(TEXT)
        made = TEXT * 2
        inner = flow.enter(made)
        made.add_(1)
        flow.leave(inner)
        flow.leave(outer)
        other = flow.enter(TEXT)
        buffer.add_(1)
        flow.leave(other)
    assert not inner.pure
    assert outer.pure
    assert not other.pure
    assert flow.is_new(made, outer)
    assert not flow.is_new(made, inner)


def test_operations_are_counted() -> None:
    flow = Dataflow([], {"text": TEXT}, [])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), flow:
            frame = flow.enter(TEXT)
            nn.functional.linear(TEXT, LATENTS)
            flow.leave(frame)
        assert frame.flops == 2 * 2 * 2 * 3
