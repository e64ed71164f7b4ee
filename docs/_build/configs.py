"""Gives config classes in the API reference the signature that they have: one argument a field, with its default.

The reference is read from the sources, nothing is imported; `config_class` makes dataclasses, which griffe cannot know.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import griffe


def is_config(found: griffe.Class) -> bool:
    """Whether `config_class` decorates a class."""
    return any(str(item.value) == "config_class" for item in found.decorators)


def fields(found: griffe.Class) -> Iterator[griffe.Parameter]:
    """The fields of one class as arguments."""
    for name, member in found.attributes.items():
        if member.annotation is None or "property" in member.labels:
            continue
        default, keyword = member.value, False
        if isinstance(default, griffe.ExprCall) and str(default.function) == "Field":
            given = {item.name: item.value for item in default.arguments if isinstance(item, griffe.ExprKeyword)}
            default, keyword = given.get("default"), str(given.get("kw_only")) == "True"
        kind = griffe.ParameterKind.keyword_only if keyword else griffe.ParameterKind.positional_or_keyword
        yield griffe.Parameter(name, annotation=member.annotation, kind=kind, default=default)


def classes(scope: griffe.Module) -> Iterator[griffe.Class]:
    """All classes that a package defines itself."""
    for member in scope.members.values():
        if member.is_alias:
            continue
        if isinstance(member, griffe.Class):
            yield member
        elif isinstance(member, griffe.Module):
            yield from classes(member)


class Configs(griffe.Extension):
    """Writes the `__init__` of every config class."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """griffe calls this when it has read a package."""
        for found in classes(pkg):
            if not is_config(found):
                continue
            line = [*reversed(found.mro()), found]
            known = {item.name: item for owner in line if is_config(owner) for item in fields(owner)}
            ordered = sorted(known.values(), key=lambda item: item.kind is griffe.ParameterKind.keyword_only)
            itself = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
            init = griffe.Function("__init__", parameters=griffe.Parameters(itself, *ordered), parent=found)
            found.set_member("__init__", init)
