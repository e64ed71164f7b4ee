"""What a recipe, a run file and the user's configuration may say about a run: `device` and `seed`."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from cachekit.devices import device_name
from offload.errors import SettingsError

LARGEST_SEED = 2**32 - 1


class RunSettings(BaseModel):
    """Settings of a run, as they stand in files. What is not set is not written.

    Attributes:
        device: "cpu", "auto", "cuda", "cuda:N" or "mps"; None when not set. "" is the same as leaving it out.
        seed: 0 to 4294967295; None, which is written as null when it was given, runs unseeded.

    Raises:
        pydantic.ValidationError: an unknown key (the nearest known one is named) or a bad value. It is a ValueError.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str | None = None
    seed: Annotated[int, Field(strict=True, ge=0, le=LARGEST_SEED)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        unknown = next((key for key in given if key not in cls.model_fields), None)
        if unknown is not None:
            raise ValueError(unknown_key(unknown))
        return {key: value for key, value in given.items() if key != "device" or not _is_empty(value)}

    @field_validator("device", mode="before")
    @classmethod
    def _accepted(cls, value: Any) -> Any:
        return device_name(value)

    @model_serializer(mode="wrap")
    def _only_what_is_set(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in write(self).items() if key in self.model_fields_set}

    def stored(self) -> dict[str, Any]:
        """The keys that are set, as plain values for JSON or YAML; empty when there is nothing to write."""
        return self.model_dump()

    def __bool__(self) -> bool:
        """True when anything is set."""
        return bool(self.model_fields_set)

    @classmethod
    def read(cls, given: Mapping[str, Any] | RunSettings | None, where: str = "settings") -> RunSettings:
        """Settings from plain values; None gives empty ones.

        Args:
            given: keys and values.
            where: where they come from, for the message.

        Raises:
            SettingsError: one line that says what is wrong.
        """
        if isinstance(given, cls):
            return given
        try:
            return cls.model_validate({} if given is None else given)
        except ValidationError as error:
            raise SettingsError(f"{where}: {_one_line(error)}") from None


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def unknown_key(key: object) -> str:
    """What is said of a key that does not exist."""
    near = get_close_matches(str(key), RunSettings.model_fields, n=1, cutoff=0.5)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown key {str(key)!r}; {guess}The keys are {', '.join(RunSettings.model_fields)}"


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    key = ".".join(str(part) for part in first["loc"] if part in RunSettings.model_fields)
    if key == "seed":
        return f"seed is a whole number from 0 to {LARGEST_SEED}, or null for none; got {first['input']!r}"
    return f"{key}: {message}" if key else message
