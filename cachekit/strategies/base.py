"""Configs, and the registry by which a strategy makes itself known."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as validated
from torch import nn
from typing_extensions import dataclass_transform

from cachekit.engine.history import Storage
from cachekit.engine.rules import Rule
from cachekit.errors import ConfigError
from cachekit.strategies.tunable import Tunable

_CONFIG = ConfigDict(extra="forbid", arbitrary_types_allowed=True, validate_default=True)

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def config_class(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass that checks its values; errors name the field and what it accepts."""
    made: Any = validated(config=_CONFIG, frozen=True)(cls)
    check = made.__init__
    positional = [field.name for field in dataclasses.fields(made) if not field.kw_only]

    @functools.wraps(check)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(positional):
            raise ConfigError(f"{cls.__name__} takes {len(positional)} positional values, got {len(args)}")
        try:
            check(self, **dict(zip(positional, args, strict=False)), **kwargs)
        except ValidationError as error:
            raise ConfigError("; ".join(_explain(cls.__name__, made, item) for item in error.errors())) from None

    made.__init__ = __init__
    return made  # type: ignore[no-any-return]


def _explain(owner: str, made: Any, item: Any) -> str:
    """One line for one problem that pydantic found."""
    name = str(item["loc"][0]) if item["loc"] else ""
    if item["type"] == "unexpected_keyword_argument":
        return f"{owner} has no field {name!r}{_nearest(name, [field.name for field in dataclasses.fields(made)])}"
    message = item["msg"].removeprefix("Value error, ")
    return f"{owner}.{name}: {message}, got {item['input']!r}" if name else f"{owner}: {message}"


def _device(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        device = torch.device(value)
    except RuntimeError:
        raise ValueError("not a torch device; use 'cpu', 'cuda', 'cuda:1' or 'mps'") from None
    missing = (device.type == "cuda" and not torch.cuda.is_available()) or (
        device.type == "mps" and not torch.backends.mps.is_available()
    )
    if missing:
        raise ValueError("torch sees no such device here; use 'cpu' or None")
    return device


Device = Annotated[torch.device | None, BeforeValidator(_device)]


def checked_patterns(patterns: Iterable[Any]) -> None:
    """Refuse what is not a regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(f"{pattern!r} is not a regular expression ({error})") from None


@config_class
class CacheConfig:
    """What all configs share.

    Args:
        cache_dtype: dtype in which results are kept; None keeps them as computed.
        cache_device: device on which results are kept ("cpu" for host memory); None keeps them where they are.
    """

    cache_dtype: torch.dtype | None = Field(default=None, kw_only=True)
    cache_device: Device = Field(default=None, kw_only=True)

    @property
    def storage(self) -> Storage:
        """Where results are kept."""
        return Storage(self.cache_dtype, self.cache_device)

    def replaced(self, **fields: Any) -> Any:
        """A validated copy with other values.

        Raises:
            ValueError: for an unknown field (with the nearest known one) or a bad value.
        """
        kept = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return type(self)(**{**kept, **fields})

    def __str__(self) -> str:
        fields = [field for field in dataclasses.fields(self) if getattr(field.default, "repr", True)]
        shown = {field.name: getattr(self, field.name) for field in fields}
        given = {f.name: shown[f.name] for f in fields if not _equal(shown[f.name], f.default)}
        return f"{type(self).__name__}({', '.join(f'{name}={_short(value)}' for name, value in given.items())})"


Builder = Callable[[Any, nn.Module], list[Rule]]


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A registered strategy.

    Attributes:
        name: short name for `enable_cache(target, name)`.
        config_class: its config.
        build: makes the rules for one denoiser.
        lossless: True when the output equals the uncached one.
        translate: makes our config from diffusers' config object of the same name.
        check: refuses a target that a config was not made for, before anything is changed.
        examples: makes configs that work without anything from the user, by what sets them apart ("" for the plain
            one); None where the defaults do.
        tunable: the number that trades fidelity for speed; None where there is none.
    """

    name: str
    config_class: type[CacheConfig]
    build: Builder
    lossless: bool = False
    translate: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    check: Callable[[Any, Any], None] | None = None
    examples: Callable[[], dict[str, CacheConfig]] | None = None
    tunable: Tunable | None = None

    def example_configs(self) -> dict[str, CacheConfig]:
        """What sets it apart -> a config that works without anything from the user."""
        return self.examples() if self.examples is not None else {"": self.config_class()}


_strategies: dict[str, Strategy] = {}


def strategy(
    name: str,
    config_class: type[CacheConfig],
    lossless: bool = False,
    translate: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    check: Callable[[Any, Any], None] | None = None,
    examples: Callable[[], dict[str, CacheConfig]] | None = None,
    tunable: Tunable | None = None,
) -> Callable[[Builder], Builder]:
    """Register the decorated function `(config, denoiser) -> list[Rule]` as a strategy."""

    def register(build: Builder) -> Builder:
        _strategies[name] = Strategy(name, config_class, build, lossless, translate, check, examples, tunable)
        return build

    return register


def strategy_names() -> list[str]:
    """Names of all registered strategies."""
    return sorted(_strategies)


def strategy_named(name: str) -> Strategy:
    """The strategy of that name.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in _strategies:
        raise ConfigError(f"unknown strategy {name!r}{_nearest(name, strategy_names())}")
    return _strategies[name]


def find_strategy(config: CacheConfig) -> Strategy:
    """The strategy of a config that :func:`to_config` gave back."""
    return next(item for item in _strategies.values() if type(config) is item.config_class)


def to_config(config: Any, overrides: dict[str, Any]) -> CacheConfig:
    """A config from a config, a strategy name, or diffusers' config object of the same class name.

    Raises:
        ValueError: for an unknown name or field, or a bad value.
        TypeError: for anything else.
    """
    if any(type(config) is item.config_class for item in _strategies.values()):
        return config.replaced(**overrides) if overrides else config  # type: ignore[no-any-return]
    if isinstance(config, str):
        return strategy_named(config).config_class(**overrides)
    for item in _strategies.values():
        foreign = type(config)
        if foreign.__name__ == item.config_class.__name__ and foreign.__module__.startswith("diffusers."):
            fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
            if item.translate is not None:
                fields = item.translate(fields)
            return item.config_class(**{**fields, **overrides})
    if isinstance(config, type):
        raise TypeError(f"{config.__name__} is a class; pass a config made from it, {config.__name__}(...)")
    raise TypeError(
        f"cannot use {type(config).__name__} as a cache config; pass one of "
        f"{', '.join(item.config_class.__name__ for item in _strategies.values())}, a name "
        f"({', '.join(strategy_names())}), or diffusers' config of the same name"
    )


def _nearest(name: str, known: list[str]) -> str:
    match = difflib.get_close_matches(name, known, 1)
    guess = f"; did you mean {match[0]!r}?" if match else ""
    return f"{guess} (known: {', '.join(known)})"


def _equal(value: Any, default: Any) -> bool:
    default = getattr(default, "default", default)
    if isinstance(value, (tuple, list)):
        return bool(value == default) if isinstance(default, tuple) else False
    return value is default or (not isinstance(value, (torch.Tensor, dict)) and value == default)


def _short(value: Any) -> str:
    if isinstance(value, dict) and list(value) == [""]:
        value = value[""]
    if isinstance(value, (tuple, list)) and len(value) > 4:
        return f"<{len(value)} values>"
    return f"{value!r}" if not isinstance(value, dict) else f"<{', '.join(map(str, value))}>"
