"""Ranks that share one denoiser call decide together.

Where the tokens or the weights of a call are spread over processes (context, sequence and tensor parallel, sharded
weights), a block is computed by all of them or by none: it waits for the others inside. Each rank sees a part of the
data, so that scores differ; the largest of them counts. Ranks that work on different prompts share nothing of this and
are never waited for.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ANOTHER_RANK = "another of the ranks that share this call computes"


class Ranks:
    """The process groups that share the calls of one denoiser. Found anew when a run begins; empty for one process.

    Known are diffusers' `enable_parallelism` and `from_pretrained(parallel_config=...)`, and parameters that are
    sharded `DTensor`s (`parallelize_module`, `fully_shard`). What splits the work otherwise has to be told.

    Attributes:
        groups: the groups to ask, one after the other; with several (a mesh of several dimensions) the maximum over
            each in turn is the maximum over all.
    """

    def __init__(self, denoiser: nn.Module) -> None:
        self._denoiser = weakref.ref(denoiser)
        self._given: Any = None
        self.groups: tuple[Any, ...] = ()
        self.look()

    def tell(self, group: Any) -> None:
        """Use this process group or device mesh and look for no other.

        Raises:
            TypeError: it is neither of the two.
        """
        check_group(group)
        self._given = group
        self.look()

    def look(self) -> None:
        """Find the groups as they are now."""
        denoiser = self._denoiser()
        found = () if denoiser is None or not _is_running() else _groups(denoiser, self._given)
        self.groups = tuple(group for group in dict.fromkeys(found) if dist.get_world_size(group) > 1)

    @property
    def count(self) -> int:
        """Number of ranks that decide together, 1 for none but this one."""
        return math.prod(dist.get_world_size(group) for group in self.groups)

    def agree(
        self,
        computes: bool,
        score: torch.Tensor | None,
        device: torch.device,
        fetch: Callable[[torch.Tensor], Any],
    ) -> tuple[bool, float]:
        """Whether any rank has to compute, and the largest score of all. Every rank has to call this.

        One reduction of two numbers for each group, and one value read back.

        Args:
            computes: True when this rank has to compute, whatever the score.
            score: one value, still on the device; None where there is none. What is no finite number counts as
                infinite, since backends disagree about the maximum of NaN.
            device: where the groups reduce.
            fetch: reads all numbers of a tensor back.
        """
        pair = torch.tensor([float(computes), -math.inf], device=device)
        if score is not None:
            value = score.detach().to(device=device, dtype=pair.dtype)
            pair[1] = torch.where(value.isfinite(), value, math.inf)
        for group in self.groups:
            dist.all_reduce(pair, dist.ReduceOp.MAX, group)
        anyone, largest = fetch(pair)
        return bool(anyone), float(largest)


def check_group(group: Any) -> None:
    """Refuse what names no ranks.

    Raises:
        TypeError: `group` is neither a process group nor a device mesh.
    """
    if not _is_mesh(group) and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            f"group takes the torch.distributed process group, or the device mesh, of the ranks that share a denoiser "
            f"call, got {type(group).__name__}; leave it out where every rank has prompts of its own"
        )


def _is_running() -> bool:
    return dist.is_available() and dist.is_initialized()


def _groups(denoiser: nn.Module, given: Any) -> Iterator[Any]:
    """The groups of a denoiser in an order that is the same on every rank; some may come twice."""
    if given is not None:
        yield from _of_mesh(given) if _is_mesh(given) else (given,)
        return
    config = getattr(denoiser, "_parallel_config", None)
    context, tensor = (getattr(config, f"{kind}_parallel_config", None) for kind in ("context", "tensor"))
    for mesh in (getattr(context, "_flattened_mesh", None), getattr(tensor, "_mesh", None)):
        if mesh is not None:
            yield from _of_mesh(mesh)
    yield from _of_weights(denoiser)


def _of_weights(denoiser: nn.Module) -> Iterator[Any]:
    """The groups that sharded weights are gathered, or partial sums added, in."""
    from torch.distributed.tensor import DTensor

    for parameter in denoiser.parameters():
        if isinstance(parameter, DTensor):
            for dimension, placement in enumerate(parameter.placements):
                if not placement.is_replicate():
                    yield parameter.device_mesh.get_group(dimension)


def _is_mesh(value: Any) -> bool:
    return dist.is_available() and isinstance(value, dist.device_mesh.DeviceMesh)


def _of_mesh(mesh: Any) -> Iterator[Any]:
    return (mesh.get_group(dimension) for dimension in range(mesh.ndim))
