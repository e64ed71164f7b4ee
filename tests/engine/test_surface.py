"""Handles, context managers, statistics and the progress bar."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

import cachekit as ck

from ..toys import ALWAYS, Stack, bare_loop, of_time, pattern, prompt, toy_pipeline
from .test_disable_restores import traces

CONDITIONS = [{"encoder_hidden_states": prompt(1)}, {"encoder_hidden_states": prompt(2)}]


@pytest.mark.parametrize("form", ["cached", "handle"])
def test_context_managers_disable_also_after_an_error(form: str) -> None:
    model = Stack(3)
    before = traces(model)
    manager = ck.cached(model, ALWAYS) if form == "cached" else ck.enable_cache(model, ALWAYS)

    def fail() -> None:
        with manager as handle:
            assert isinstance(handle, ck.Handle)
            assert ck.is_cache_enabled(model)
            bare_loop(model, 3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert traces(model) == before
    assert not ck.is_cache_enabled(model)


def test_statistics_are_plain_data() -> None:
    pipe = toy_pipeline(change=of_time(torch.cos))
    with ck.cached(pipe, ALWAYS):
        assert "not called yet" in str(ck.stats(pipe))
        assert json.loads(json.dumps(ck.stats(pipe).to_dict()))
        pipe(conditions=CONDITIONS)
        stats = ck.stats(pipe)
        data = json.loads(json.dumps(stats.to_dict()))
        text = str(stats)
    decisions = data["denoisers"]["transformer"][0]["last"]["decisions"]
    assert len(decisions) == 16 == stats.calls
    assert stats.calls == stats.computed + stats.reused == 2 + 14
    assert {item["branch"] for item in decisions} == {"cond", "uncond"}
    assert all(item["reason"] for item in decisions)
    assert "14 reused" in text
    assert "#......." in text
    assert stats.overhead_seconds > 0
    assert str(ck.stats(pipe)) == "no cache enabled"


def test_statistics_of_an_earlier_moment_do_not_change() -> None:
    pipe = toy_pipeline()
    with ck.cached(pipe, ALWAYS):
        pipe(8)
        first = ck.stats(pipe)
        text = str(first)
        pipe(5)
        assert str(first) == text


def test_totals_go_on_and_runs_are_counted() -> None:
    pipe = toy_pipeline()
    with ck.cached(pipe, ALWAYS):
        for _ in range(3):
            pipe(5)
        item = ck.stats(pipe).denoisers["transformer"]
        assert (item.runs, item.total_calls, item.total_reused) == (3, 15, 12)
        assert ck.stats(pipe).calls == 5


@pytest.mark.parametrize("progress", [True, False])
def test_progress_bar(progress: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Bar:
        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def update(self, *_: Any) -> None: ...

        def set_postfix_str(self, text: str, refresh: bool = True) -> None:
            shown.append(text)

    monkeypatch.setattr(DiffusionPipeline, "progress_bar", lambda self, iterable=None, total=None: Bar())
    pipe = toy_pipeline()
    with ck.cached(pipe, ALWAYS, progress=progress):
        pipe(8)
    assert shown[-1:] == (["reused 7/8"] if progress else [])


def test_report_and_config() -> None:
    handle = ck.enable_cache(Stack(3), "first_block", threshold=0.25)
    assert handle.config == ck.FirstBlockCacheConfig(threshold=0.25)
    assert "threshold=0.25" in handle.report
    assert "blocks (3)" in handle.report


def test_several_configs_one_after_the_other() -> None:
    """U09: run, enable, run, disable, run, enable another one, run."""
    pipe = toy_pipeline(change=of_time(torch.cos))
    base = pipe()
    for config in (ALWAYS, "taylorseer", ck.MagCacheConfig(mag_ratios=[1.01] * 8), ALWAYS):
        with ck.cached(pipe, config):
            pipe()
            assert "." in pattern(pipe)
        assert torch.equal(pipe(), base)


def test_a_denoiser_that_calls_itself_is_one_call() -> None:
    class Twice(Stack):
        def forward(self, hidden_states: torch.Tensor, timestep: Any, deep: bool = False) -> tuple[torch.Tensor]:
            return super().forward(hidden_states, timestep) if deep else self(hidden_states, timestep, deep=True)

    model = Twice(3)
    with ck.cached(model, ALWAYS):
        bare_loop(model, 6)
        assert ck.stats(model).calls == 6


def test_keyword_and_positional_arguments_are_the_same() -> None:
    model = Stack(3)
    with ck.cached(model, ALWAYS), torch.no_grad():
        x, held = torch.ones(1, 4, 8), prompt(1)
        for step in range(6):
            t = torch.tensor(6.0 - step)
            if step % 2:
                model(x, t, held)
            else:
                model(timestep=t, encoder_hidden_states=held, hidden_states=x)
        assert pattern(model) == "#....."


def test_blocks_called_outside_the_denoiser_run_as_usual() -> None:
    model = Stack(3)
    with ck.cached(model, ALWAYS):
        bare_loop(model, 4)
        x = torch.zeros(1, 4, 8)
        assert torch.equal(model.blocks[2](x, torch.tensor(1.0)), x + 0.5)
