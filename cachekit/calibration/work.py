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
    """What was counted, once the block has ended.

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
    work, counter = Work(), _Counter()
    handles: list[Any] = []
    try:
        for denoiser in denoisers:
            handles.append(denoiser.register_forward_pre_hook(counter.begin))
            handles.append(denoiser.register_forward_hook(counter.end, always_call=True))
        with counter:
            yield work
    finally:
        work.calls, work.flops = counter.calls, counter.flops
        for handle in handles:
            handle.remove()


class _Counter(TorchDispatchMode):
    """Adds up the operations between the beginning and the end of denoiser calls.

    It is entered before the first call and left after the last, not around each: what follows a call in a mode of its
    own is stepped out of in the order of entering.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.flops = 0
        self._inside = 0

    def begin(self, module: nn.Module, args: Any) -> None:
        self.calls += 1
        self._inside += 1

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._inside or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        formula = flop_registry.get(_FORMULA_OF.get(func._overloadpacket, func._overloadpacket))
        if formula is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if parts is NotImplemented else parts
        result = func(*args, **kwargs)
        self.flops += int(formula(*args, **kwargs, out_val=result))
        return result


_FORMULA_OF = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
}
"""Operations that cost what another one does."""
