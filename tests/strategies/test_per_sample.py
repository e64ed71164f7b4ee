"""Samples of a batch that decide separately: a batch equals its samples run one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cachekit as ck
from cachekit.strategies import strategy_named

from ..pipelines.tiny import TINY
from ..toys import ALWAYS, WIDTH, Stack, bare_loop, counted_syncs, latents, pattern, toy_pipeline

EACH = ck.FirstBlockCacheConfig(0.1, per_sample=True)
PROMPTS = ("a cat", "the red dog runs", "x")


def grows(hidden_states: Tensor, temb: Tensor) -> Tensor:
    """A residual that follows the input, so that every sample drifts at its own pace."""
    return hidden_states * 0.5


def samples(*rates: float) -> Callable[[int], Tensor]:
    """Step -> latents whose samples grow at these rates; 0 stands still."""
    rows = [latents(seed=seed) + 3 for seed in range(len(rates))]
    return lambda step: torch.cat([row * (1 + rate * step) for row, rate in zip(rows, rates, strict=True)])


@torch.no_grad()
def loop(model: nn.Module, at: Callable[[int], Tensor], steps: int = 10, **kwargs: Any) -> list[Tensor]:
    return [model(at(step), torch.tensor(float(steps - step)), **kwargs)[0].clone() for step in range(steps)]


def alone(model: nn.Module, at: Callable[[int], Tensor], count: int, config: ck.CacheConfig = EACH) -> list[Any]:
    """(pattern, outputs) of every sample run by itself."""
    results = []
    for i in range(count):
        with ck.cached(model, config):
            outputs = loop(model, lambda step, i=i: at(step)[i : i + 1])
            results.append((pattern(model), outputs))
    return results


def run_of(model: nn.Module) -> Any:
    run = ck.stats(model).last
    assert run is not None
    return run


def per_sample(model: nn.Module) -> list[str]:
    """One pattern a sample."""
    rows = [decision.reused_samples for decision in run_of(model).decisions]
    return ["".join("." if reused else "#" for reused in column) for column in zip(*rows, strict=True)]


SEA = ck.SeaCacheConfig(0.5, max_consecutive_cached=3, per_sample=True)


@pytest.mark.parametrize("config", [EACH, SEA], ids=["first_block", "seacache"])
@pytest.mark.parametrize("rates", [(0.0, 0.3), (0.3, 0.0), (0.0, 0.3, 0.04), (0.2, 0.0, 0.05, 0.0, 0.3)])
def test_a_static_and_a_changing_sample(rates: Sequence[float], config: ck.CacheConfig) -> None:
    """U121. The toy's sums are exact, so a batch equals its samples bit by bit. Every sample has a cap of its own."""
    model, at = Stack(4, grows), samples(*rates)
    singles = alone(model, at, len(rates), config)
    assert len({shape for shape, _ in singles}) > 1
    with ck.cached(model, config):
        outputs = loop(model, at)
        assert per_sample(model) == [shape for shape, _ in singles]
    for i, (_, expected) in enumerate(singles):
        assert all(torch.equal(output[i : i + 1], other) for output, other in zip(outputs, expected, strict=True))


def test_off_by_default_and_then_one_decision_holds_for_all() -> None:
    model, at = Stack(4, grows), samples(0.04, 0.3)
    with ck.cached(model, ck.FirstBlockCacheConfig(0.1)):
        outputs = loop(model, at)
        assert not run_of(model).samples
        assert "+" not in str(ck.stats(model)).split("\n")[2]
    (_, slow), _ = alone(model, at, 2)
    assert not all(torch.equal(output[:1], other) for output, other in zip(outputs, slow, strict=True))


def test_blocks_run_on_the_samples_that_compute_only() -> None:
    """But for the one call in which the whole batch is computed too, to compare."""
    model, at = Stack(3, grows), samples(0.0, 0.3)
    rows: list[int] = []
    model.blocks[1].register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[0]))
    with ck.cached(model, EACH):
        loop(model, at)
        assert rows == [2, 1, 2, *[1] * 7, 1][: len(rows)]
        assert rows.count(2) == 2
        rows.clear()
        loop(model, at)
        assert rows.count(2) == 1


def test_what_the_statistics_say() -> None:
    model, at = Stack(4, grows), samples(0.0, 0.3, 0.3)
    with ck.cached(model, EACH):
        loop(model, at)
        run = run_of(model)
        assert (run.samples, run.computed_samples) == (
            30,
            30 - sum(map(sum, (d.reused_samples for d in run.decisions))),
        )
        assert run.decisions[1].reused_samples == (True, False, False)
        assert not run.decisions[1].reused
        assert run.decisions[1].scores[0] == 0.0
        assert run.decisions[1].scores[1] > 0.1
        assert run.decisions[1].reason == "2 of 3 samples computed"
        text = str(ck.stats(model))
        assert f"{run.computed_samples} of 30 computed" in text
        assert "+ some samples computed" in text
        assert ck.stats(model).to_dict()["denoisers"][""][0]["last"]["decisions"][1]["reused_samples"]


def test_all_scores_are_read_together() -> None:
    model, at = Stack(4, grows), samples(*[0.02 * i for i in range(6)])
    with ck.cached(model, EACH):
        loop(model, at)
        with counted_syncs() as seen:
            loop(model, at)
        many = len(seen)
    with ck.cached(model, ck.FirstBlockCacheConfig(0.1)):
        loop(model, at)
        with counted_syncs() as seen:
            loop(model, at)
    assert many <= len(seen)


def test_threshold_zero_changes_no_bit() -> None:
    model, at = Stack(4, grows), samples(0.0, 0.3)
    base = loop(model, at)
    with ck.cached(model, ck.FirstBlockCacheConfig(0.0, per_sample=True)):
        assert all(torch.equal(a, b) for a, b in zip(loop(model, at), base, strict=True))
        assert run_of(model).computed_samples == run_of(model).samples == 20
    assert all(torch.equal(a, b) for a, b in zip(loop(model, at), base, strict=True))


def test_all_samples_reuse_the_rows_of_different_steps() -> None:
    """After steps that only some computed, a reuse by all adds to each the change of its own step."""
    model = Stack(3, grows)
    x = latents(batch=2) + 3
    twice = torch.cat([x[:1], 2 * x[1:]])
    (expected,) = loop(model, lambda step: twice, 1)
    with ck.cached(model, EACH):
        outputs = loop(model, lambda step: twice if step else x, 6)
        assert per_sample(model) == ["#.....", "##...."]
    assert torch.equal(outputs[-1], expected)


def test_bytes_held_are_those_of_the_batch() -> None:
    model, at = Stack(4, grows), samples(0.0, 0.3, 0.05)
    held = []
    for config in (ck.FirstBlockCacheConfig(0.1), EACH):
        with ck.cached(model, config):
            loop(model, at)
            assert ck.stats(model).bytes_held == ck.stats(model).peak_bytes
            held.append(ck.stats(model).bytes_held)
            ck.free(model)
            assert ck.stats(model).bytes_held == 0
    assert held[0] == held[1] == 2 * 3 * 4 * WIDTH * 4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_sample_with_bad_numbers_computes_and_leaves_the_others_alone(value: float) -> None:
    model, good = Stack(4, grows), samples(0.0, 0.0)

    def at(step: int) -> Tensor:
        x = good(step).clone()
        x[1] *= value if step > 2 else 1
        return x

    with ck.cached(model, EACH):
        with pytest.warns(ck.CacheWarning, match="not a finite number"):
            outputs = loop(model, at, 6)
        assert run_of(model).notes == ["the score is not a finite number"]
        assert per_sample(model) == ["#.....", "#..###"]
    assert torch.equal(outputs[-1][0], outputs[0][0])


class Mixing(Stack):
    """Every block adds the mean over the batch."""

    def __init__(self) -> None:
        super().__init__(4, lambda x, t: x * 0.5 + x.mean(dim=0, keepdim=True))


class Folded(Stack):
    """Samples and tokens share the first dimension of the blocks."""

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        x = hidden_states.flatten(0, 1)[:, None]
        for block in self.blocks:
            x = block(x, timestep)
        return (x.reshape(hidden_states.shape),)


class Lookup(nn.Module):
    """Blocks that get a list with one element a sample."""

    class Block(nn.Module):
        def forward(self, hidden_states: Tensor, each: list[Tensor]) -> Tensor:
            return hidden_states + torch.stack([x * 0.5 * y for x, y in zip(hidden_states, each, strict=True)])

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> tuple[Tensor]:
        x = hidden_states
        for block in self.blocks:
            x = block(x, [torch.ones(())] * len(x))
        return (x,)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Mixing(), "influence each other"),
        (Folded(4, grows), "no dimension for the samples"),
        (Lookup(), "does not run on a part of the batch"),
    ],
)
def test_what_cannot_be_split_gets_one_decision_and_a_note(model: nn.Module, message: str) -> None:
    at = samples(0.0, 0.3)
    with ck.cached(model, EACH):
        with pytest.warns(ck.CacheWarning, match=message):
            outputs = loop(model, at)
        assert all(torch.isfinite(output).all() for output in outputs)
        first = list(run_of(model).notes)
        with pytest.warns(ck.CacheWarning, match=message):
            loop(model, at)
        assert run_of(model).notes == first
        assert not run_of(model).samples
        again = pattern(model)
        with pytest.warns(ck.CacheWarning, match=message):
            expected = loop(model, at)
    assert "." in again
    with ck.cached(model, ck.FirstBlockCacheConfig(0.1)):
        shared = loop(model, at)
        assert pattern(model) == again
    assert all(torch.equal(a, b) for a, b in zip(shared, expected, strict=True))


def test_one_sample_needs_no_note() -> None:
    model, at = Stack(4, grows), samples(0.04)
    with ck.cached(model, EACH):
        loop(model, at)
        assert not run_of(model).notes
        assert not run_of(model).samples
        each = pattern(model)
    with ck.cached(model, ck.FirstBlockCacheConfig(0.1)):
        loop(model, at)
        assert pattern(model) == each


def test_blocks_that_write_into_their_input() -> None:
    model, at = Stack(4, grows, in_place=(1, 2, 3)), samples(0.0, 0.3)
    singles = alone(model, at, 2)
    with ck.cached(model, EACH):
        outputs = loop(model, at)
        assert run_of(model).computed_samples < run_of(model).samples
    for i, (_, expected) in enumerate(singles):
        assert all(torch.equal(output[i : i + 1], other) for output, other in zip(outputs, expected, strict=True))


def test_switched_on_while_enabled_and_runs_do_not_leak() -> None:
    model, at = Stack(4, grows), samples(0.0, 0.3)
    with ck.cached(model, EACH) as handle:
        first = loop(model, at)
        bomb = model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop(model, at)
        bomb.remove()
        loop(model, samples(0.1, 0.2, 0.3), 4)
        loop(model, samples(0.1), 4)
        assert all(torch.equal(a, b) for a, b in zip(loop(model, at), first, strict=True))
        handle.update(per_sample=False)
        loop(model, at)
        assert not run_of(model).samples
        handle.update(per_sample=True)
        assert all(torch.equal(a, b) for a, b in zip(loop(model, at), first, strict=True))


def test_an_abort_inside_the_call_that_compares() -> None:
    """The error of a hook in a block is the user's, not a sign that the batch cannot be split."""
    model, at = Stack(4, grows), samples(0.0, 0.3)
    with ck.cached(model, EACH):
        bomb = model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0 if model.blocks[0].calls > 1 else None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ck.CacheWarning)
            with pytest.raises(ZeroDivisionError):
                loop(model, at)
        bomb.remove()


def test_batch_that_changes_within_a_run() -> None:
    pipe = toy_pipeline(change=grows)
    with ck.cached(pipe, ALWAYS.replaced(per_sample=True)):
        with torch.no_grad():
            bare_loop(pipe.transformer, 4, x=latents(batch=2))
            outputs = bare_loop(pipe.transformer, 4, x=latents(batch=3))
        assert torch.isfinite(torch.stack(outputs)).all()


def run(name: str, pipe: Any, indices: Sequence[int]) -> Tensor:
    generators = [torch.Generator().manual_seed(10 + index) for index in indices]
    prompts = [PROMPTS[index] for index in indices]
    return TINY[name].call(pipe, steps=10, prompt=prompts, generator=generators if len(indices) > 1 else generators[0])


CASES = [("first_block", name) for name in ("flux", "wan", "sd3", "sd15", "z-image", "qwen-image")]
CASES += [("seacache", name) for name in ("flux", "wan", "sd3")]


@pytest.mark.parametrize(("strategy", "name"), CASES)
def test_real_pipelines(strategy: str, name: str) -> None:
    """With two calls a step and with [uncond, cond] in one; a sample is one half of it then."""
    pipe = TINY[name].build()
    with ck.cached(pipe, strategy, threshold=0.0), warnings.catch_warnings():
        warnings.simplefilter("ignore", ck.CacheWarning)
        run(name, pipe, [0])
        run(name, pipe, [1])
        scores = sorted(d.score for d in run_of(pipe).decisions if d.score is not None)
    factor = {"first_block": 1.1, "seacache": 1.5}[strategy]
    config = strategy_named(strategy).config_class(threshold=factor * scores[len(scores) // 2], per_sample=True)
    base = torch.cat([run(name, pipe, [index]) for index in range(3)])
    with ck.cached(pipe, config):
        singles = torch.cat([run(name, pipe, [index]) for index in range(3)])
        batch = run(name, pipe, [0, 1, 2])
        last = run_of(pipe)
        assert not last.notes
        assert 0 < last.computed_samples < last.samples
        assert any(0 < sum(d.reused_samples) < len(d.reused_samples) for d in last.decisions)
        assert torch.equal(run(name, pipe, [0, 1, 2]), batch)
    torch.testing.assert_close(batch, singles, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(batch, base, rtol=1e-3, atol=1e-3)
