"""Names the arguments of a call and the tensors of a result, whatever way a module is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def parameter_names(module_class: type[nn.Module]) -> tuple[str, ...]:
    """Names of the positional parameters of `module_class.forward`, without `self`."""
    return _names_of(module_class.forward)


@lru_cache(maxsize=4096)
def _names_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return tuple(parameter.name for parameter in parameters if parameter.kind in _POSITIONAL)


def bind(module_class: type[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Argument name -> value in signature order; surplus positional arguments are called `arg<i>`."""
    names = parameter_names(module_class)
    bound = {names[i] if i < len(names) else f"arg{i}": value for i, value in enumerate(args)}
    bound.update(kwargs)
    return bound


Key = int | str | None


def items(output: Any) -> Iterator[tuple[Key, Any]]:
    """The parts of a result: (None, tensor) for a bare one, (position, part) for tuples, (key, part) for mappings."""
    if isinstance(output, Mapping):
        yield from output.items()
    elif isinstance(output, (tuple, list)):
        yield from enumerate(output)
    else:
        yield None, output


def rebuild(template: Any, parts: Mapping[Key, Any]) -> Any:
    """A result of the same form as `template` with its parts replaced."""
    if isinstance(template, Mapping):
        form: Any = type(template)
        return form({key: parts[key] for key in template})
    if isinstance(template, (tuple, list)):
        values = [parts[i] for i in range(len(template))]
        if hasattr(template, "_fields"):
            return type(template)(*values)
        return type(template)(values)
    return parts[None]


def is_floating(value: Any) -> bool:
    """True for tensors that can be predicted."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """All tensors of a nested argument or result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping) and depth:
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif isinstance(value, (list, tuple)) and depth:
        for item in value:
            yield from tensors_in(item, depth - 1)


Path = tuple[Key, ...]


def replace_tensors(value: Any, replace: Callable[[torch.Tensor, Path], Any], path: Path = ()) -> Any:
    """A nested result of the same form in which every tensor gave way to `replace(tensor, path)`."""
    if isinstance(value, torch.Tensor):
        return replace(value, path)
    if isinstance(value, (Mapping, list, tuple)):
        return rebuild(value, {key: replace_tensors(part, replace, (*path, key)) for key, part in items(value)})
    return value


def fill_tensors(form: Any, fill: Callable[[Any, Path], torch.Tensor], path: Path = ()) -> Any:
    """The other way round: what :func:`replace_tensors` put in (a tensor or a dtype) gives way to a tensor."""
    if isinstance(form, (torch.Tensor, torch.dtype)):
        return fill(form, path)
    if isinstance(form, (Mapping, list, tuple)):
        return rebuild(form, {key: fill_tensors(part, fill, (*path, key)) for key, part in items(form)})
    return form
