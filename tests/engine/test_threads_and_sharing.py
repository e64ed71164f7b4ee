"""Contract 8: threads, pipelines and denoisers do not share state."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from diffusers import EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler

import cachekit as ck

from ..pipelines.tiny import TINY
from ..toys import ScriptedConfig, Stack, ToyPipeline, bare_loop, latents, pattern, prompt, toy_pipeline

CONFIG = ScriptedConfig(computed=(0, 3))


def change(x: Any, t: Any) -> Any:
    return 0.25 * x + torch.cos(t)


def together(*jobs: Any) -> list[Any]:
    """Run the jobs in threads that take turns at every denoiser call's step."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return results


def alternating() -> Any:
    """A callback that lets two threads proceed in lockstep."""
    barrier = threading.Barrier(2, timeout=60)

    def wait(*_: Any) -> None:
        barrier.wait()

    return wait


def test_two_pipelines_in_two_threads() -> None:
    pipes = [toy_pipeline(change=change) for _ in range(2)]
    for pipe in pipes:
        ck.enable_cache(pipe, CONFIG)
    expected = [pipe(8, x=latents(seed=index)) for index, pipe in enumerate(pipes)]
    wait = alternating()
    results = together(*(lambda i=i, p=p: p(8, x=latents(seed=i), callback=wait) for i, p in enumerate(pipes)))
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert [pattern(pipe) for pipe in pipes] == ["#..#...."] * 2


def test_two_pipelines_that_share_a_transformer_in_two_threads() -> None:
    model = Stack(4, change)
    pipes = [ToyPipeline(model, FlowMatchEulerDiscreteScheduler()) for _ in range(2)]
    ck.enable_cache(pipes[0], CONFIG)
    expected = [pipe(8, x=latents(seed=i, tokens=4 + i)) for i, pipe in enumerate(pipes)]
    wait = alternating()
    results = together(
        *(lambda i=i, p=p: p(8, x=latents(seed=i, tokens=4 + i), callback=wait) for i, p in enumerate(pipes))
    )
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_two_threads_on_one_bare_denoiser() -> None:
    model = Stack(4, change)
    ck.enable_cache(model, CONFIG)
    expected = [bare_loop(model, 8, x=latents(seed=seed)) for seed in (0, 1)]
    wait = alternating()
    results = together(*(lambda s=s: bare_loop(model, 8, x=latents(seed=s), at_step=wait) for s in (0, 1)))
    for result, wanted in zip(results, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(result, wanted, strict=True))


@pytest.mark.parametrize("config", [CONFIG, ck.FirstBlockCacheConfig(threshold=1e9)], ids=["scripted", "first_block"])
def test_two_threads_learn_the_layout_at_the_same_time(config: Any) -> None:
    """The very first calls of two threads are inside the same denoiser together, block by block."""

    single = Stack(4, change)
    with ck.cached(single, config):
        expected = [bare_loop(single, 6, x=latents(seed=seed, tokens=4 + seed)) for seed in (0, 1)]
        steps = pattern(single)
    model = Stack(4, change)
    wait = alternating()
    for module in (model, *model.blocks):
        module.register_forward_pre_hook(wait)
    ck.enable_cache(model, config)
    results = together(*(lambda s=s: bare_loop(model, 6, x=latents(seed=s, tokens=4 + s)) for s in (0, 1)))
    for result, wanted in zip(results, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(result, wanted, strict=True))
    assert "." in steps
    assert pattern(model) == steps
    assert ck.stats(model).denoisers[""].runs == 2
    assert ck.stats(model).denoisers[""].total_calls == 12


def test_the_same_prompt_tensor_in_two_threads() -> None:
    pipes = [toy_pipeline(change=change) for _ in range(2)]
    shared = [{"encoder_hidden_states": prompt(1)}]
    for pipe in pipes:
        ck.enable_cache(pipe, CONFIG)
    expected = [pipe(8, x=latents(seed=index), conditions=shared) for index, pipe in enumerate(pipes)]
    jobs = (lambda i=i, p=p: p(8, x=latents(seed=i), conditions=shared) for i, p in enumerate(pipes))
    assert all(torch.equal(a, b) for a, b in zip(together(*jobs), expected, strict=True))


def test_a_cache_enabled_and_disabled_on_one_pipeline_while_another_runs() -> None:
    runner, other = toy_pipeline(change=change), toy_pipeline(change=change)
    ck.enable_cache(runner, CONFIG)
    expected = runner(8)

    def toggle(_: ToyPipeline, index: int) -> None:
        with ck.cached(other, CONFIG):
            other(2)

    assert torch.equal(runner(8, callback=toggle), expected)
    assert pattern(runner) == "#..#...."


def test_pipelines_that_share_a_transformer_take_turns() -> None:
    """`from_pipe`: enabled through one, run through both, with schedulers and step counts of their own."""
    model = Stack(4, change)
    first = ToyPipeline(model, FlowMatchEulerDiscreteScheduler())
    second = ToyPipeline(model, EulerDiscreteScheduler())
    ck.enable_cache(first, CONFIG)
    assert ck.is_cache_enabled(second)
    wanted = first(8), second(5)
    assert ck.stats(second).last.steps == 5
    assert ck.stats(second).last.source == "scheduler"
    assert torch.equal(first(8), wanted[0])
    assert torch.equal(second(5), wanted[1])
    ck.disable_cache(second)
    assert not ck.is_cache_enabled(first)


def test_pipelines_that_share_a_transformer_and_interleave() -> None:
    """One denoiser call of each in turn, in one thread."""
    model = Stack(4, change)
    first, second = (ToyPipeline(model, FlowMatchEulerDiscreteScheduler()) for _ in range(2))
    ck.enable_cache(first, CONFIG)
    wanted = second(1)

    def nested(pipe: ToyPipeline, index: int) -> None:
        assert torch.equal(second(1), wanted)

    plain = first(8)
    assert torch.equal(first(8, callback=nested), plain)


def test_a_shared_transformer_under_another_name_gives_no_false_alarm(recwarn: pytest.WarningsRecorder) -> None:
    """The expert of one pipeline is the only denoiser of another."""
    expert = Stack(4, change)
    both = ToyPipeline(Stack(4, change), FlowMatchEulerDiscreteScheduler(), transformer_2=expert)
    alone = ToyPipeline(expert, FlowMatchEulerDiscreteScheduler())
    ck.enable_cache(both, CONFIG)
    alone(8)
    alone(8)
    assert not [item for item in recwarn if "replaced" in str(item.message)]


def test_both_denoisers_of_one_pipeline() -> None:
    pipe = ToyPipeline(Stack(4, change), FlowMatchEulerDiscreteScheduler(), transformer_2=Stack(3, change))
    with ck.cached(pipe, ScriptedConfig(computed=(0, 5))):
        first = pipe(10, switch=4)
        stats = ck.stats(pipe)
        assert [d.step for d in stats.denoisers["transformer"].last.decisions] == [0, 1, 2, 3]
        assert [d.step for d in stats.denoisers["transformer_2"].last.decisions] == [4, 5, 6, 7, 8, 9]
        assert [d.reused for d in stats.denoisers["transformer_2"].last.decisions] == [False, False] + [True] * 4
        assert stats.bytes_held == 0
        assert torch.equal(pipe(10, switch=4), first)


def test_wan_with_two_experts() -> None:
    tiny = TINY["wan-two-experts"]
    pipe = tiny.build()
    base = tiny.call(pipe, steps=10)
    with ck.cached(pipe, ck.TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=1)):
        output = tiny.call(pipe, steps=10)
        stats = ck.stats(pipe)
        steps = [[d.step for d in stats.denoisers[name].last.of("cond")] for name in tiny.denoisers]
        assert steps[0] + steps[1] == list(range(10))
        assert all(stats.denoisers[name].last.reused for name in tiny.denoisers)
        assert stats.bytes_held == 0
        assert torch.equal(tiny.call(pipe, steps=10), output)
    assert not torch.equal(output, base)


def test_a_second_expert_that_is_none() -> None:
    """U23: `transformer_2=None` is no denoiser."""
    pipe = ToyPipeline(Stack(4), FlowMatchEulerDiscreteScheduler(), transformer_2=None)
    with ck.cached(pipe, CONFIG) as handle:
        pipe(6, conditions=[{"encoder_hidden_states": prompt(1)}])
        assert "transformer_2" not in handle.report
