"""Contract 4: with frozen inputs a skipped call returns what the computed one did, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cachekit as ck

from ..conformance.cases import cases
from ..toys import ALWAYS, ScriptedConfig, Stack, bare_loop, latents, of_time, pattern

FROZEN = [torch.tensor(3.0)] * 8
CONFIGS: dict[str, Any] = {
    "reuse after the probe": ALWAYS,
    "reuse": ScriptedConfig(computed=(0,)),
    "order 1": ScriptedConfig(computed=(0, 2, 3), order=1),
    "order 2": ScriptedConfig(computed=(0, 1, 3, 5), order=2),
    "order 3": ScriptedConfig(computed=(0, 1, 2, 4, 5), order=3),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("blocks", [2, 5])
def test_toy(blocks: int, config: Any) -> None:
    model = Stack(blocks, lambda x, t: 0.5 * x + t)
    base = bare_loop(model, move=0.0, times=FROZEN)
    with ck.cached(model, config):
        output = bare_loop(model, move=0.0, times=FROZEN)
        assert "." in pattern(model)
    assert all(torch.equal(a, b) for a, b in zip(base, output, strict=True))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_toy_with_ordinary_numbers(dtype: torch.dtype, config: Any) -> None:
    """`input + (output - input)` rounds: at most one unit in the last place on each side."""
    model = Stack(4, lambda x, t: torch.sin(3 * x) / 3).to(dtype)
    x = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    base = bare_loop(model, move=0.0, x=x, times=FROZEN)
    with ck.cached(model, config):
        output = bare_loop(model, move=0.0, x=x, times=FROZEN)
        assert "." in pattern(model)
    unit = torch.finfo(dtype).eps * max(result.abs().max().item() for result in base)
    assert max((a - b).abs().max().item() for a, b in zip(base, output, strict=True)) <= 2 * unit


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_the_residual_is_added_once(blocks: int) -> None:
    """U13: a skipped stack of constant residuals returns its moved input plus the sum, not a sum per block."""
    model = Stack(blocks + 1)
    with ck.cached(model, ScriptedConfig(computed=(0,))):
        output = bare_loop(model, 4)
        assert pattern(model) == "#..."
    for step, result in enumerate(output):
        assert torch.equal(result, latents() + 0.125 * step + 0.5 * (blocks + 1))


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "SD3Transformer2DModel", "LatteTransformer3DModel"])
@torch.no_grad()
def test_real_denoisers(name: str) -> None:
    case = next(case for case in cases() if case.cls.__name__ == name)
    model = case.build()
    inputs = case.inputs(0)
    base = case.output(model(**inputs))
    for config in (ALWAYS, ScriptedConfig(computed=(0, 1), order=1)):
        with ck.cached(model, config):
            outputs = [case.output(model(**inputs)) for _ in range(5)]
            assert pattern(model).count(".") >= 3
        for output in outputs:
            torch.testing.assert_close(output, base, rtol=1e-5, atol=1e-5)


def test_moving_inputs_are_not_exact() -> None:
    """The tests above can fail: a residual that changes is not predicted by reuse."""
    model = Stack(4, of_time(torch.sin))
    base = bare_loop(model)
    with ck.cached(model, ScriptedConfig(computed=(0,))):
        output = bare_loop(model)
    assert torch.equal(base[0], output[0])
    assert not any(torch.equal(a, b) for a, b in zip(base[1:], output[1:], strict=True))
