"""What a trace found constant in a denoiser, and what is kept of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from cachekit.engine.binding import Key
from cachekit.engine.conditioning import Conditioning, TensorLeaf
from cachekit.engine.history import Entry
from cachekit.engine.sites import Saving

Moving = tuple[tuple[TensorLeaf, ...], ...]
"""The latents and the timesteps of a call."""

KEPT = "kept"
"""Where an entry says what its results were made from."""

COPIES = "copies"
"""Where an entry has the copies of the arguments, so that they count as bytes held."""


@dataclass(frozen=True)
class Unit:
    """A module whose result does not depend on the step.

    Attributes:
        path: its path in the denoiser.
        arguments: names of the tensors among the denoiser's arguments that the result depends on.
        form: the result with None for its tensors.
        devices: output key -> device of the tensor.
        attends: True for what is, holds or lies in attention; False for what only leads there.
        saving: what a reuse spares.
    """

    path: str
    arguments: frozenset[str]
    form: Any = field(repr=False)
    devices: Mapping[Key, torch.device] = field(repr=False)
    attends: bool
    saving: Saving


class Plan:
    """What is constant in calls of one form.

    Attributes:
        units: path -> module whose result is kept.
        confirmed: paths of those that gave the same bits in two computed calls.
        nothing: why there are no units.
    """

    def __init__(self, units: Iterable[Unit], denoiser: nn.Module, nothing: str) -> None:
        self.units = {unit.path: unit for unit in units}
        self.nothing = nothing
        self.confirmed: frozenset[str] = frozenset()
        inside = [part for path in self.units for part in denoiser.get_submodule(path).modules()]
        self._modules = [weakref.ref(module) for module in inside]
        self._dtypes = self._dtypes_now()

    @property
    def arguments(self) -> frozenset[str]:
        """All arguments that anything depends on."""
        return frozenset().union(*(unit.arguments for unit in self.units.values()))

    @property
    def projections(self) -> int:
        """Number of projections in all units."""
        return sum(unit.saving.projections for unit in self.units.values())

    def trains(self) -> bool:
        """True when one of the modules was set to training mode."""
        modules = (reference() for reference in self._modules)
        return any(module.training for module in modules if module is not None)

    def recast(self) -> bool:
        """True when weights were given another dtype, which torch does in place and without a trace."""
        return self._dtypes_now() != self._dtypes

    @property
    def is_open(self) -> bool:
        """True while some modules have not been called a second time."""
        return not self.confirmed >= self.units.keys()

    def settle(self, equal: frozenset[str], other: frozenset[str]) -> None:
        """Modules that gave the same bits in a second call, and others. Without keys and values none is worth it."""
        units = {path: unit for path, unit in self.units.items() if path not in other}
        self.units = units if any(unit.attends for unit in units.values()) else {}
        self.confirmed |= equal

    def leaves(self, conditioning: Conditioning) -> dict[str, TensorLeaf]:
        """The arguments of a call that matter."""
        leaves = {name: conditioning.leaves.get(name) for name in self.arguments}
        return {name: leaf for name, leaf in leaves.items() if isinstance(leaf, TensorLeaf)}

    def _dtypes_now(self) -> list[torch.dtype | None]:
        modules = (reference() for reference in self._modules)
        weights = (weight for module in modules if module is not None for weight in module._parameters.values())
        return [None if weight is None else weight.dtype for weight in weights]


@dataclass
class Kept:
    """What the results in an entry were made from: the plan, the arguments, and the latents and timesteps.

    The arguments carry copies: another tensor object on the same memory may have brought other values there.
    """

    plan: Plan
    leaves: dict[str, TensorLeaf]
    moving: Moving

    @classmethod
    def put(cls, entry: Entry, plan: Plan, leaves: Mapping[str, TensorLeaf], moving: Moving) -> None:
        """Note in an entry what it was made from."""
        copied = {name: replace(leaf, copy=leaf.value().clone()) for name, leaf in leaves.items()}
        entry.passive[KEPT] = cls(plan, copied, moving)
        entry.passive[COPIES] = [leaf.copy for leaf in copied.values()]

    def refresh(self, leaves: Mapping[str, TensorLeaf]) -> None:
        """Equal arguments came in other tensors; from now on these are recognised without a comparison."""
        self.leaves = {
            name: replace(leaf, copy=self.leaves[name].copy) for name, leaf in leaves.items() if name in self.leaves
        }
