"""Stable Diffusion with every sampler and every strategy, also from an image: guidance in one batch, all contracts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionImg2ImgPipeline
from torch import Tensor, nn

import cachekit as ck
from cachekit.strategies import CacheConfig, find_strategy, strategy_named

from ..conformance.checks import STRATEGIES, config_for
from ..shipped import shipped_strategies
from .families import unet
from .parts import picture
from .tiny import TINY

pytestmark = [
    pytest.mark.filterwarnings("ignore::cachekit.CacheWarning"),
    pytest.mark.xdist_group("unets"),  # shares built pipelines and runs
]
STEPS = 10
SAMPLERS = {"ddim": STEPS, "euler": STEPS, "lcm": STEPS, "pndm": STEPS + 1, "heun": 2 * STEPS - 1}
"""Entries of the schedule: PNDM runs one twice, Heun all but the last."""
STRENGTHS = {0.3: 3, 0.5: 5, 1.0: STEPS}
SD = TINY["sd15"]


def configs() -> dict[str, CacheConfig]:
    """Settings that skip, of every strategy: those of the conformance suite, else the strategy's own example."""
    model = SD.build().unet
    chosen = {name: config_for(settings.always, model) for name, settings in STRATEGIES.items()}
    covered = {find_strategy(config).name for config in chosen.values()}
    for name in sorted(set(shipped_strategies()) - covered):
        examples = strategy_named(name).example_configs()
        chosen |= {f"{name} {which}".strip(): config for which, config in examples.items()}
    return chosen


CONFIGS = configs()
"""Nine strategies, TaylorSeer at both of its sites."""
every_config = pytest.mark.parametrize("name", CONFIGS)


@cache
def sampled(sampler: str) -> tuple[DiffusionPipeline, Tensor]:
    """Stable Diffusion 1.5 with a sampler, and its uncached output under guidance."""
    pipe = unet.scheduler(SD.build(), sampler)
    return pipe, SD.call(pipe, steps=STEPS)


@cache
def from_image() -> DiffusionPipeline:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe = StableDiffusionImg2ImgPipeline(**unet.components())
    pipe.set_progress_bar_config(disable=True)
    return unet.scheduler(pipe, "ddim")


def redrawn(strength: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"strength": strength, "num_inference_steps": STEPS, "generator": generator}
    output = from_image()("a cat", image=picture(16, 16), output_type="latent", return_dict=False, **options)
    return torch.as_tensor(output[0])


@contextmanager
def counted(module: nn.Module) -> Iterator[list[int]]:
    """One number for every forward pass."""
    calls: list[int] = []
    hook = module.register_forward_pre_hook(lambda *_: calls.append(1))
    yield calls
    hook.remove()


def hooked(pipe: DiffusionPipeline) -> list[str]:
    return [name for name, module in pipe.unet.named_modules() if "_compiled_call_impl" in module.__dict__]


def test_every_strategy_is_here() -> None:
    assert {find_strategy(config).name for config in CONFIGS.values()} == set(shipped_strategies())


@every_config
@pytest.mark.parametrize(("sampler", "count"), SAMPLERS.items())
def test_every_sampler(sampler: str, count: int, name: str) -> None:
    pipe, base = sampled(sampler)
    config = CONFIGS[name]
    with ck.cached(pipe, config) as handle:
        output = SD.call(pipe, steps=STEPS)
        assert torch.equal(SD.call(pipe, steps=STEPS), output)
        last = handle.stats().last
        assert last.steps == count
        assert [step for step, _ in sorted({(d.step, d.call) for d in last.decisions})] == list(range(count))
        assert torch.isfinite(output).all()
        assert last.reused > 0
        assert torch.equal(output, base) == find_strategy(config).lossless
        assert handle.stats().bytes_held == 0
    assert not hooked(pipe)
    assert torch.equal(SD.call(pipe, steps=STEPS), base)


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize(("sampler", "count"), SAMPLERS.items())
def test_the_deep_part_runs_on_a_third_of_the_steps(sampler: str, count: int, depth: int) -> None:
    pipe, base = sampled(sampler)
    with ck.cached(pipe, "deepcache", cache_interval=1, branch_depth=depth):
        assert torch.equal(SD.call(pipe, steps=STEPS), base)
    down, up = pipe.unet.down_blocks, pipe.unet.up_blocks
    with (
        ck.cached(pipe, "deepcache", branch_depth=depth) as handle,
        counted(pipe.unet.mid_block) as deep,
        counted(up[-depth]) as shallow,
        counted(down[depth] if depth < len(down) else pipe.unet.mid_block) as first,
    ):
        SD.call(pipe, steps=STEPS)
        assert handle.stats().last.computed_steps() == tuple(range(0, count, 3))
    assert len(deep) == len(first) == -(-count // 3)
    assert len(shallow) == count


@every_config
@pytest.mark.parametrize(("strength", "count"), STRENGTHS.items())
def test_from_an_image_the_executed_steps_count(strength: float, count: int, name: str) -> None:
    pipe, config = from_image(), CONFIGS[name]
    base = redrawn(strength)
    with ck.cached(pipe, config) as handle:
        output = redrawn(strength)
        last = handle.stats().last
        assert last.steps == count
        assert {decision.step for decision in last.decisions} == set(range(count))
        assert torch.equal(output, base) == (find_strategy(config).lossless or not last.reused)
        assert torch.equal(redrawn(strength), output)
    assert torch.equal(redrawn(strength), base)


@pytest.mark.parametrize(("strength", "count"), STRENGTHS.items())
def test_deepcache_from_an_image(strength: float, count: int) -> None:
    """Interval, warm-up and centre follow the steps that are executed, not the whole schedule."""
    pipe = from_image()
    with ck.cached(pipe, "deepcache"):
        redrawn(strength)
        assert ck.stats(pipe).last.computed_steps() == tuple(range(0, count, 3))
    with ck.cached(pipe, "deepcache", disable_cache_before_step=2, cache_interval=4):
        redrawn(strength)
        assert ck.stats(pipe).last.computed_steps() == (0, *range(1, count, 4))
    with ck.cached(pipe, "deepcache", centre=15, power=2.0):
        redrawn(strength)
        computed = ck.stats(pipe).last.computed_steps()
        assert computed[0] == 0
        assert len(computed) == -(-count // 3)
