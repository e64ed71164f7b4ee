"""Which output of a block continues which of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import nn

from cachekit.engine.binding import Key, is_floating, items
from cachekit.engine.metadata import TransformerBlockRegistry

Read = Callable[[torch.Tensor], float]


def match_streams(
    block: nn.Module, arguments: Mapping[str, Any], reached: Container[str], output: Any, read: Read
) -> dict[Key, str]:
    """Output key -> name of the argument that it continues; outputs without a partner are left out.

    Blocks are residual, so an output resembles its input: among arguments of equal shape the one with the highest
    cosine similarity is taken; a single output continues an argument that the latents reach, if there is one. An only
    candidate is taken as it is. What is registered for the class wins.

    Args:
        block: the block that was called.
        arguments: its tensors as they were before the call.
        reached: names of the arguments that depend on the latents.
        output: what it returned.
        read: reads a number back from the device.
    """
    outputs = {key: value for key, value in items(output) if is_floating(value)}
    metadata = TransformerBlockRegistry.find(type(block))
    if metadata is not None:
        named = metadata.streams()
        if None in outputs:
            named = {None: metadata.hidden_states_argument_name}  # type: ignore[dict-item]
        return {
            key: name for key, name in named.items() if key in outputs and _alike(arguments.get(name), outputs[key])
        }
    candidates = {name: value for name, value in arguments.items() if is_floating(value)}
    pairs = [(key, name) for key, out in outputs.items() for name, value in candidates.items() if _alike(value, out)]
    if len(outputs) == 1:
        pairs = [pair for pair in pairs if pair[1] in reached] or pairs
    if len(outputs) == 1 and len(pairs) == 1:
        return dict(pairs)
    scored = sorted(pairs, key=lambda pair: -cosine(outputs[pair[0]], candidates[pair[1]], read))
    streams: dict[Key, str] = {}
    for key, name in scored:
        if key not in streams and name not in streams.values():
            streams[key] = name
    return {key: streams[key] for key in outputs if key in streams}


def still_fits(streams: Mapping[Key, str], arguments: Mapping[str, Any], output: Any) -> bool:
    """True when streams found on one block serve another call as well."""
    outputs = {key: value for key, value in items(output) if is_floating(value)}
    return bool(streams) and all(
        key in outputs and _alike(arguments.get(name), outputs[key]) for key, name in streams.items()
    )


def _alike(value: Any, output: torch.Tensor) -> bool:
    return is_floating(value) and value.shape == output.shape and value.ndim >= 2


def cosine(a: torch.Tensor, b: torch.Tensor, read: Read) -> float:
    """Cosine similarity of two tensors of equal shape; -1 where it is not a number."""
    similarity = torch.nn.functional.cosine_similarity(a.flatten().float(), b.flatten().float(), dim=0)
    return read(similarity.nan_to_num(-1.0))
