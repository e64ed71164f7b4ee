"""Schedule: listed steps are computed, the whole denoiser is predicted in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import cachekit as ck
from cachekit.strategies.schedule import CoefficientTable

from ..toys import Stack, bare_loop, latents, pattern, prompt, toy_pipeline


def of_time(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x) * torch.cos(t / 300)


TWO = [{"encoder_hidden_states": prompt(0)}, {"encoder_hidden_states": prompt(1)}]
EVERY_SECOND = ck.ScheduleCacheConfig((0, 2, 4, 6))


def test_listed_steps_are_computed_and_nothing_else_runs() -> None:
    pipe = toy_pipeline(change=of_time)
    with ck.cached(pipe, EVERY_SECOND):
        pipe(conditions=TWO)
        stats = ck.stats(pipe)
        assert stats.last.computed_steps("cond") == stats.last.computed_steps("uncond") == (0, 2, 4, 6)
        assert pipe.transformer.calls == [8] * 4
        assert stats.host_syncs == 0
    assert "whole denoiser" in stats.denoisers["transformer"].site


def test_full_schedule_changes_no_bit() -> None:
    pipe = toy_pipeline(change=of_time)
    base = pipe(conditions=TWO)
    with ck.cached(pipe, ck.ScheduleCacheConfig(range(8))):
        assert torch.equal(pipe(conditions=TWO), base)
    assert torch.equal(pipe(conditions=TWO), base)


def test_branches_can_have_lists_of_their_own() -> None:
    pipe = toy_pipeline(change=of_time)
    config = ck.ScheduleCacheConfig({"cond": (0, 1, 3, 5, 7), "uncond": (0, 4)})
    with ck.cached(pipe, config):
        pipe(conditions=TWO)
        last = ck.stats(pipe).last
    assert last.computed_steps("cond") == (0, 1, 3, 5, 7)
    assert last.computed_steps("uncond") == (0, 4)


def test_linear_outputs_are_predicted_exactly() -> None:
    model = Stack(3, lambda x, t: torch.ones_like(x) * t).double()
    x, times = torch.zeros(1, 4, 8, dtype=torch.float64), [torch.tensor(8.0 - step) for step in range(8)]
    base = bare_loop(model, x=x, times=times, move=0.0)
    with ck.cached(model, ck.ScheduleCacheConfig((0, 1, 5), order=1)):
        outputs = bare_loop(model, x=x, times=times, move=0.0)
    for output, expected in zip(outputs, base, strict=True):
        torch.testing.assert_close(output, expected)


def test_coefficients_are_used_where_they_belong() -> None:
    rows = {3: ((2, 0), (3.0, -2.0)), 5: ((2, 0), (9.0, -8.0))}
    config = ck.ScheduleCacheConfig((0, 2, 4), coefficients=CoefficientTable(rows), order=0)
    model = Stack(1, lambda x, t: torch.ones_like(x) * t)
    x, times = torch.zeros(1, 4, 8), [torch.tensor(8.0 - step) for step in range(6)]
    with ck.cached(model, config):
        outputs = [float(output.mean()) for output in bare_loop(model, x=x, times=times, move=0.0)]
    assert outputs[3] == 3 * 6 - 2 * 8
    assert outputs[5] == outputs[4], "the row for step 5 belongs to other steps, so the last result is reused"


@pytest.mark.parametrize("depth", [2, 3])
def test_frozen_inputs_are_exact(depth: int) -> None:
    rows = {3: ((2, 1, 0)[:depth], (2.5, -1.0, -0.5)[:depth])}
    config = ck.ScheduleCacheConfig((0, 1, 2, 4), coefficients=CoefficientTable(rows), depth=depth)
    model, x = Stack(2), latents()
    with ck.cached(model, config), torch.no_grad():
        outputs = [model(x, torch.tensor(1.0))[0] for _ in range(6)]
        assert ck.stats(model).reused == 2
    assert all(torch.equal(output, outputs[0]) for output in outputs)


class Outside(nn.Module):
    """A denoiser unlike any of diffusers: no blocks, a nested result with a list and an integer tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.ran = 0

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor) -> dict[str, Any]:
        self.ran += 1
        out = self.linear(sample) * timestep
        return {"sample": [out, (out * 2,)], "count": torch.tensor(3), "note": "kept"}


def test_any_module_and_any_form_of_result() -> None:
    model = Outside()
    with ck.cached(model, ck.ScheduleCacheConfig((0, 1), order=1)), torch.no_grad():
        results = [model(latents(seed=step), torch.tensor(4.0 - step)) for step in range(4)]
    assert model.ran == 2
    for result in results[2:]:
        assert result["note"] == "kept"
        assert int(result["count"]) == 3
        torch.testing.assert_close(result["sample"][1][0], 2 * result["sample"][0])
    assert not torch.equal(results[2]["sample"][0], results[3]["sample"][0])


def test_what_is_handed_out_can_be_overwritten() -> None:
    model, x = Stack(2), latents()
    with ck.cached(model, ck.ScheduleCacheConfig((0,), order=0)), torch.no_grad():
        first = model(x, torch.tensor(1.0))[0]
        expected = first.clone()
        first += 1
        for _ in range(3):
            output = model(x, torch.tensor(1.0))[0]
            assert torch.equal(output, expected)
            output += 1


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_compiled_as_a_whole(in_place: bool) -> None:
    model = Stack(2, of_time)
    base = bare_loop(model)
    target: Any = model
    if in_place:
        model.compile(backend="eager")
    else:
        target = torch.compile(model, backend="eager")
    with ck.cached(target, ck.ScheduleCacheConfig((0, 2, 4, 6), order=0)):
        outputs = bare_loop(target)
        assert ck.stats(target).reused == 4
    assert torch.equal(outputs[1], base[0])
    assert torch.equal(outputs[2], base[2])


def test_another_number_of_steps_computes_and_says_so() -> None:
    pipe = toy_pipeline(change=of_time)
    base = pipe(6)
    with ck.cached(pipe, ck.ScheduleCacheConfig((0, 2), num_inference_steps=8)):
        with pytest.warns(ck.CacheWarning, match="schedule is for 8 steps, this run has 6"):
            assert torch.equal(pipe(6), base)
        pipe(8)
        assert pattern(pipe) == "#.#....."


def test_an_aborted_run_does_not_leak() -> None:
    pipe = toy_pipeline(change=of_time)

    def stop(pipe: Any, index: int) -> None:
        if index == 3:
            raise KeyboardInterrupt

    with ck.cached(pipe, EVERY_SECOND):
        clean = pipe()
        with pytest.raises(KeyboardInterrupt):
            pipe(callback=stop)
        assert torch.equal(pipe(), clean)
        pipe(x=latents(2, 6, seed=3))
        assert torch.equal(pipe(), clean)
        assert ck.stats(pipe).bytes_held == 0


def test_state_is_as_many_outputs_as_are_combined() -> None:
    pipe = toy_pipeline(change=of_time)
    with ck.cached(pipe, ck.ScheduleCacheConfig((0, 1, 2, 3, 5), order=1)):
        pipe()
        assert ck.stats(pipe).peak_bytes == 2 * latents().nbytes


def test_a_new_prompt_computes() -> None:
    pipe = toy_pipeline(change=of_time)

    def changing(index: int) -> list[dict[str, Any]]:
        return [{"encoder_hidden_states": prompt(int(index >= 3))}]

    with ck.cached(pipe, ck.ScheduleCacheConfig((0,), order=0)):
        pipe(conditions=changing)
        assert pattern(pipe) == "#..#...."


@pytest.mark.parametrize(
    "wrong",
    [(), (1, 2), (0, 2, 2), (0, 5, 3), (0, 1.5), "abc", {}, {"cond": ()}, 3],
    ids=str,
)
def test_bad_lists(wrong: Any) -> None:
    with pytest.raises(ck.ConfigError, match="computed_steps"):
        ck.ScheduleCacheConfig(wrong)


def test_a_step_outside_of_the_run() -> None:
    with pytest.raises(ck.ConfigError, match="step 9 lies outside of 8 steps"):
        ck.ScheduleCacheConfig((0, 9), num_inference_steps=8)


def test_copies_of_the_config() -> None:
    config = ck.ScheduleCacheConfig((0, 3), order=0)
    assert copy.deepcopy(config) == config
    assert config.replaced(order=1).computed_steps == {"": (0, 3)}
    assert "computed_steps" in str(config)
