"""Counts what the denoisers of a pipeline really compute: calls and floating-point operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Work:
    """What was counted.

    Attributes:
        calls: calls that reached a denoiser's own forward.
        flops: floating-point operations of matrix products, convolutions and attention in them; elementwise work and
            kernels that torch has no formula for are left out.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.flops = 0


@contextmanager
def counted(denoisers: Iterable[nn.Module]) -> Iterator[Work]:
    """Count inside the block. It slows the calls down, so that they should not be timed; results stay the same."""
    work = Work()
    handles: list[Any] = []
    try:
        for denoiser in denoisers:
            counter = _Counter(work)
            handles.append(denoiser.register_forward_pre_hook(counter.begin))
            handles.append(denoiser.register_forward_hook(counter.end, always_call=True))
        yield work
    finally:
        for handle in handles:
            handle.remove()


class _Counter(TorchDispatchMode):
    """Adds up the operations between the beginning and the end of a denoiser call."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work
        self._entered = 0

    def begin(self, module: nn.Module, args: Any) -> None:
        self._work.calls += 1
        self._entered += 1
        if self._entered == 1:
            self.__enter__()

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._entered -= 1
        if not self._entered:
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(_FORMULA_OF.get(func._overloadpacket, func._overloadpacket))
        if formula is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        if formula is not None:
            self._work.flops += int(formula(*args, **kwargs, out_val=result))
        return result


_FORMULA_OF = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
}
"""Operations that cost what another one does."""
