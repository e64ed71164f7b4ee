"""What a transformer block returns: registered by hand where structural discovery should be overruled."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import nn


@dataclass(frozen=True)
class TransformerBlockMetadata:
    """Names the streams of a block class. Field names are those of diffusers' class of the same name.

    Args:
        return_hidden_states_index: position of the image stream in the returned tuple; None for a block that returns
            one tensor.
        return_encoder_hidden_states_index: position of the text stream in the returned tuple; None when the block
            does not return it.
        hidden_states_argument_name: name of the argument that carries the image stream.
        encoder_hidden_states_argument_name: name of the argument that carries the text stream.
    """

    return_hidden_states_index: int | None = None
    return_encoder_hidden_states_index: int | None = None
    hidden_states_argument_name: str = "hidden_states"
    encoder_hidden_states_argument_name: str = "encoder_hidden_states"

    def streams(self) -> dict[int, str]:
        """Output position -> argument name; the image stream comes first."""
        streams = {self.return_hidden_states_index or 0: self.hidden_states_argument_name}
        if self.return_encoder_hidden_states_index is not None:
            streams[self.return_encoder_hidden_states_index] = self.encoder_hidden_states_argument_name
        return streams


class TransformerBlockRegistry:
    """Block class -> metadata. What is registered wins over what is discovered; most classes need no entry."""

    _entries: ClassVar[dict[type[nn.Module], TransformerBlockMetadata]] = {}

    @classmethod
    def register(cls, model_class: type[nn.Module], metadata: TransformerBlockMetadata) -> None:
        """Register `metadata` for `model_class` and its subclasses; takes effect at the next `enable_cache`.

        Args:
            model_class: class of a block.
            metadata: ours, or diffusers' object of the same class name.

        Raises:
            TypeError: when `model_class` is not a module class or `metadata` is of another type.
        """
        if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
            raise TypeError(f"model_class must be a subclass of torch.nn.Module, got {model_class!r}")
        if not isinstance(metadata, TransformerBlockMetadata):
            metadata = _translated(metadata)
        cls._entries[model_class] = metadata

    @classmethod
    def unregister(cls, model_class: type[nn.Module]) -> None:
        """Forget what was registered for `model_class`; unknown classes are ignored."""
        cls._entries.pop(model_class, None)

    @classmethod
    def find(cls, model_class: type) -> TransformerBlockMetadata | None:
        """The entry of `model_class` or of its nearest registered base class."""
        return next((cls._entries[base] for base in model_class.__mro__ if base in cls._entries), None)


def _translated(metadata: Any) -> TransformerBlockMetadata:
    """Ours from diffusers' object of the same name."""
    foreign = type(metadata)
    if foreign.__name__ != TransformerBlockMetadata.__name__ or not foreign.__module__.startswith("diffusers."):
        raise TypeError(f"metadata must be a TransformerBlockMetadata, got {foreign.__name__}")
    return TransformerBlockMetadata(*(getattr(metadata, field.name) for field in fields(TransformerBlockMetadata)))
