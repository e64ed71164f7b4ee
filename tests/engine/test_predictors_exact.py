"""Contract 7: Taylor of order n is exact on polynomials of degree n in the step index, however steps are spaced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cachekit as ck
from cachekit.engine.clock import View
from cachekit.strategies.predictors import Reuse, Taylor

from ..toys import ScriptedConfig, Stack, bare_loop, pattern


def at(step: int) -> View:
    return View(0, step, None, "timestep")


SPACED = {1: (0, 3, 4, 9), 2: (0, 1, 4, 6, 11), 3: (0, 2, 3, 7, 8, 12), 4: (0, 1, 3, 4, 8, 9)}


@pytest.mark.parametrize("order", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("gaps", [(1, 1, 1, 1), (2, 1, 3, 5), (7, 1, 1, 2)])
def test_predictor(order: int, gaps: tuple[int, ...]) -> None:
    coefficients = torch.randn(order + 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(order))
    steps = [20]
    for gap in gaps[:order]:
        steps.append(steps[-1] - gap)
    values = [sum(c * step**power for power, c in enumerate(coefficients)) for step in steps]
    for target in (21, 24, 30):
        expected = sum(c * target**power for power, c in enumerate(coefficients))
        torch.testing.assert_close(Taylor(order).predict(steps, values, at(target)), expected)


def test_one_more_degree_is_not_exact() -> None:
    values = [torch.tensor([float(step**3)]) for step in (6, 4, 1)]
    assert not torch.isclose(Taylor(2).predict([6, 4, 1], values, at(9)), torch.tensor([729.0]), rtol=0.01)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_predictor_falls_back_to_the_order_that_it_has(order: int) -> None:
    value = torch.tensor([3.0])
    assert torch.equal(Taylor(order).predict([4], [value], at(9)), value)
    line = [torch.tensor([10.0]), torch.tensor([4.0])]
    assert torch.equal(Taylor(order).predict([5, 2], line, at(9)), torch.tensor([18.0]))


def test_equal_results_are_kept_bit_by_bit() -> None:
    value = torch.randn(100, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        kept = value.to(dtype)
        assert torch.equal(Taylor(3).predict([9, 7, 4, 3], [kept] * 4, at(13)), kept)
        assert torch.equal(Reuse().predict([9], [kept], at(13)), kept)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_through_the_engine(order: int) -> None:
    """Timesteps fall by 1/8 a step, so that a polynomial of the timestep is one of the step index."""

    def change(x: Tensor, t: Tensor) -> Tensor:
        return torch.ones_like(x) * (1 - 2 * t + (t**2 if order > 1 else 0) - (t**3 if order > 2 else 0))

    model = Stack(3, change).double()
    times = [torch.tensor((16 - step) / 8, dtype=torch.float64) for step in range(16)]
    x = torch.zeros(1, 4, 8, dtype=torch.float64)
    base = bare_loop(model, x=x, times=times)
    computed = SPACED[order]
    with ck.cached(model, ScriptedConfig(computed=computed, order=order)):
        output = bare_loop(model, x=x, times=times)
        assert ck.stats(model).last.computed_steps() == computed
        assert pattern(model).count(".") == 16 - len(computed)
    for step in range(sorted(computed)[order], 16):
        torch.testing.assert_close(output[step], base[step], rtol=1e-12, atol=1e-12)


def test_taylorseer_forecast_with_one_sample_reuses() -> None:
    """U17: after a change of shape there is one sample; a slope from before the change must not be used."""
    model = Stack(3, lambda x, t: torch.ones_like(x) * t)
    config = ck.TaylorSeerCacheConfig(cache_interval=9, disable_cache_before_step=3, max_order=2)
    with ck.cached(model, config), torch.no_grad():
        for step in range(8):
            time = torch.tensor(float(8 - step))
            output = model(torch.zeros(1, 4 if step < 5 else 6, 8), time)[0]
            if step > 5:
                assert torch.equal(output, torch.full_like(output, 3 * 3.0))
        assert pattern(model) == "###..#.."


def test_update_of_the_order_takes_effect_in_the_run() -> None:
    model = Stack(3, lambda x, t: torch.ones_like(x) * t**2).double()
    times = [torch.tensor(16.0 - step, dtype=torch.float64) for step in range(16)]
    x = torch.zeros(1, 4, 8, dtype=torch.float64)
    base = bare_loop(model, x=x, times=times)
    handle = ck.enable_cache(model, ScriptedConfig(computed=(0, 1, 4, 5, 6, 8), order=1))

    def at_step(step: int) -> None:
        if step == 3:
            handle.update(order=2)

    output = bare_loop(model, x=x, times=times, at_step=at_step)
    torch.testing.assert_close(output[15], base[15])
    assert not torch.isclose(output[2], base[2]).all()
