"""The T5 tokenizer of the embedded pipelines."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast, T5TokenizerFast

__all__ = ["PreTrainedTokenizerFast", "ShortT5Tokenizer"]  # diffusers looks the base class up beside a custom class


class ShortT5Tokenizer(T5TokenizerFast):  # type: ignore[misc]
    """A T5 tokenizer that lower-cases and that never goes beyond its ``model_max_length``.

    ``FluxPipeline`` asks for 512 tokens unless told otherwise; the prompts here have at most a handful of words, and
    every padding token would cost time in each of the transformer's joint attentions.
    """

    def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Tokenize a string or a list of strings; see the base class."""
        if kwargs.get("max_length") is not None:
            kwargs["max_length"] = min(kwargs["max_length"], self.model_max_length)
        return super().__call__(lowered(text), *args, **kwargs)


def lowered(text: Any) -> Any:
    """Lower-case a string, or every string of a list."""
    if isinstance(text, str):
        return text.lower()
    return [lowered(part) for part in text] if isinstance(text, (list, tuple)) else text
