"""Which weights of a component come and go together, and which stay.

Found by structure: the elements of the outermost lists of blocks (UNets: the blocks of both halves and the middle one).
Everything else stays: embedders, heads, norms, buffers, and what is shared between groups or with the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from offload.layout import Group

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Grouping:
    """The groups of a component in the order of registration.

    Attributes:
        resident: path -> parameter of everything that stays.
        resident_bytes: its bytes, with buffers; what is tied counts once.
        notes: what could not be put into a group, and why.
    """

    groups: list[Group]
    resident: dict[str, nn.Parameter]
    resident_bytes: int
    notes: list[str]

    @property
    def nbytes(self) -> int:
        """Bytes of all groups."""
        return sum(group.nbytes for group in self.groups)


def group_weights(component: nn.Module, granularity: str = "block", device: torch.device = _CPU) -> Grouping:
    """Divide the weights of a component.

    Args:
        component: any module.
        granularity: "block", or "leaf" for every module that has weights of its own.
        device: where the weights will compute.
    """
    find = _leaves if granularity == "leaf" else _blocks
    places = list(find(component))
    names = _names_by_parameter(component)
    claims = Counter(id(parameter) for _, chain in places for parameter in {*chain[0].parameters()})
    groups: list[Group] = []
    grouped: set[int] = set()
    notes: list[str] = []
    for path, chain in places:
        inside = {f"{path}.{name}": parameter for name, parameter in chain[0].named_parameters()}
        own = {name: item for name, item in inside.items() if _is_private(item, path, names, claims)}
        strange = sorted({type(item).__name__ for item in own.values() if not is_plain(item)})
        if strange:
            notes.append(f"{path} stays: its weights are quantised ({', '.join(strange)})")
            continue
        own = {name: item for name, item in own.items() if item.numel() and not item.is_meta}
        if own:
            groups.append(Group(path, chain, own, device))
            grouped.update(id(item) for item in own.values())
    resident = {name: item for name, item in component.named_parameters() if id(item) not in grouped}
    stays = sum(item.nbytes for item in resident.values()) + sum(buffer.nbytes for buffer in component.buffers())
    return Grouping(groups, resident, stays, notes)


def is_plain(parameter: torch.Tensor) -> bool:
    """False for subclasses that carry more than their data (quantised weights of bitsandbytes, torchao, GGUF, ...)."""
    return type(parameter) in (nn.Parameter, torch.Tensor) and type(parameter.data) is torch.Tensor


def _names_by_parameter(component: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in component.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _is_private(parameter: nn.Parameter, path: str, names: dict[int, list[str]], claims: Counter[int]) -> bool:
    """True when nothing outside of the module at `path` has this parameter."""
    inside = all(name.startswith(f"{path}.") for name in names[id(parameter)])
    return inside and claims[id(parameter)] == 1


def _blocks(component: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    lists = list(_elements_of_lists(component, "", []))
    known = {id(module) for _, chain in lists for module in chain[0].modules()}
    middle = getattr(component, "mid_block", None)
    if isinstance(middle, nn.Module) and id(middle) not in known:
        lists.append(("mid_block", [middle, component]))
    seen: set[int] = set()
    for path, chain in lists:
        if id(chain[0]) not in seen:
            seen.add(id(chain[0]))
            yield path, chain


def _elements_of_lists(
    module: nn.Module, prefix: str, around: list[nn.Module]
) -> Iterator[tuple[str, list[nn.Module]]]:
    chain = [module, *around]
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList):
            for index, element in enumerate(child):
                if element is None:
                    continue
                if type(element).forward is nn.Module.forward:  # a container, such as a list or a bare nn.Module
                    yield from _elements_of_lists(element, f"{path}.{index}.", [child, *chain])
                else:
                    yield f"{path}.{index}", [element, child, *chain]
        else:
            yield from _elements_of_lists(child, f"{path}.", chain)


def _leaves(
    component: nn.Module, prefix: str = "", around: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[str, list[nn.Module]]]:
    for name, child in component.named_children():
        path = f"{prefix}{name}"
        if next(child.children(), None) is None:
            if next(child.parameters(), None) is not None:
                yield path, [child, component, *around]
        else:
            yield from _leaves(child, f"{path}.", (component, *around))
