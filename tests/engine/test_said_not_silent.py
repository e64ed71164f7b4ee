"""Contract 10: what does not work as expected is warned about once a run, and stands in the statistics."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

import cachekit as ck
from cachekit.engine import observers

from ..pipelines.tiny import TINY
from ..toys import ALWAYS, ScriptedConfig, Stack, ToyPipeline, bare_loop, of_time, pattern, prompt, toy_pipeline


def heard(function: Any) -> list[str]:
    """Messages of our warnings during a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(item.message) for item in caught if issubclass(item.category, ck.CacheWarning)]


def notes(target: Any, name: str = "transformer") -> list[str]:
    return ck.stats(target).denoisers[name].last.notes


def test_a_cache_that_works_says_nothing() -> None:
    pipe = toy_pipeline(change=of_time(torch.cos))
    ck.enable_cache(pipe, ScriptedConfig(computed=(0, 3, 7)))
    assert heard(pipe) == []
    assert notes(pipe) == []


def test_never_hit() -> None:
    pipe = toy_pipeline(change=of_time(torch.cos))
    ck.enable_cache(pipe, ck.FirstBlockCacheConfig(threshold=1e-9))
    for _ in range(2):
        messages = heard(pipe)
        assert len(messages) == 1, "once per run"
        assert "nothing was reused" in messages[0]
        assert "drift >= threshold" in messages[0], "says why"
        assert any("nothing was reused" in note for note in notes(pipe))


def test_never_hit_with_guidance_is_one_warning() -> None:
    pipe = toy_pipeline(change=of_time(torch.cos))
    ck.enable_cache(pipe, ck.FirstBlockCacheConfig(threshold=1e-9))
    conditions = [{"encoder_hidden_states": prompt(1)}, {"encoder_hidden_states": prompt(2)}]
    assert len(heard(lambda: pipe(conditions=conditions))) == 1


def test_never_hit_mentions_few_steps() -> None:
    """U81: hardly any strategy helps a run of three steps."""
    pipe = toy_pipeline()
    ck.enable_cache(pipe, "taylorseer")
    assert any("3 steps" in message for message in heard(lambda: pipe(3)))


def test_a_cache_that_hits_one_branch_only_is_no_never_hit() -> None:
    pipe = toy_pipeline()
    ck.enable_cache(pipe, ALWAYS)
    assert heard(lambda: pipe(conditions=lambda i: [{"guidance": 1.0}, {"control": torch.ones(1, 4, 8) * i}])) == []


def test_never_hit_on_the_first_of_two_denoisers() -> None:
    """The first expert never sees the last step, and must be reported all the same."""
    pipe = ToyPipeline(Stack(4), FlowMatchEulerDiscreteScheduler(), transformer_2=Stack(4))
    ck.enable_cache(pipe, ScriptedConfig(computed=(0, 1, 2, 3)))
    assert any("`transformer`" in message for message in heard(lambda: pipe(10, switch=4)))
    assert any("nothing was reused" in note for note in notes(pipe))


def test_never_hit_on_a_bare_denoiser_is_told_when_the_next_run_begins() -> None:
    model = Stack(4, of_time(torch.cos))
    ck.enable_cache(model, ck.FirstBlockCacheConfig(threshold=1e-9))
    messages = heard(lambda: [bare_loop(model) for _ in range(2)])
    assert any("nothing was reused" in message for message in messages)


def test_only_the_cap_decided() -> None:
    pipe = toy_pipeline()
    ck.enable_cache(pipe, "magcache", mag_ratios=[1.0] * 8, max_skip_steps=2)
    messages = heard(pipe)
    assert len(messages) == 1
    assert "cap" in messages[0]
    assert any("cap" in note for note in notes(pipe))


def test_a_denoiser_replaced_after_enabling() -> None:
    pipe = toy_pipeline()
    ck.enable_cache(pipe, ALWAYS)
    heard(pipe)
    pipe.transformer = Stack(4)
    messages = heard(pipe)
    assert len(messages) == 1
    assert "replaced" in messages[0]
    assert "enable_cache" in messages[0], "names the cure"


def test_the_cure_for_a_replaced_denoiser_cures() -> None:
    pipe = toy_pipeline()
    ck.enable_cache(pipe, ALWAYS)
    pipe()
    pipe.transformer = Stack(4)
    heard(pipe)
    ck.disable_cache(pipe)
    ck.enable_cache(pipe, ALWAYS)
    assert heard(pipe) == []
    assert pattern(pipe) == "#......."


def test_a_replaced_denoiser_stands_in_the_statistics() -> None:
    pipe = toy_pipeline()
    handle = ck.enable_cache(pipe, ALWAYS)
    pipe()
    pipe.transformer = Stack(4)
    heard(pipe)
    assert "replaced" in str(handle.stats()) + str(ck.stats(pipe))


def test_a_denoiser_put_back_is_cached_again() -> None:
    pipe = toy_pipeline()
    ck.enable_cache(pipe, ALWAYS)
    pipe()
    old, pipe.transformer = pipe.transformer, Stack(4)
    heard(pipe)
    pipe.transformer = old
    assert heard(pipe) == []
    assert pattern(pipe) == "#......."


def test_diffusers_own_cache_enabled_later_is_said() -> None:
    from diffusers import FirstBlockCacheConfig

    tiny = TINY["flux"]
    pipe = tiny.build()
    ck.enable_cache(pipe, ALWAYS)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    messages = heard(lambda: tiny.call(pipe, steps=3, guidance=False))
    assert any("disable_cache" in message for message in messages)
    assert ck.stats(pipe).reused == 0


def test_strict_raises_where_a_warning_would_come_and_leaves_a_model_that_runs() -> None:
    class Shuffled(Stack):
        """Blocks that do not see the latents."""

        def forward(self, hidden_states: torch.Tensor, timestep: Any, **kwargs: Any) -> tuple[torch.Tensor]:
            side = torch.ones(1, 4, 8)
            for block in self.blocks:
                side = block(side, torch.as_tensor(timestep))
            return (hidden_states + side,)

    model = Shuffled(3)
    base = bare_loop(model)
    ck.enable_cache(model, ScriptedConfig(computed=(0,)), strict=True)
    with pytest.raises(ck.UnsupportedModelError):
        bare_loop(model)
    assert not ck.is_cache_enabled(model), "rolled back"
    assert all(torch.equal(a, b) for a, b in zip(bare_loop(model), base, strict=True))
    ck.disable_cache(model)
    ck.enable_cache(model, ScriptedConfig(computed=(0,)))
    messages = heard(lambda: bare_loop(model))
    assert len(messages) == 1
    assert pattern(model) == "#" * 8


@pytest.mark.timeout(20)
def test_an_engine_collected_while_another_is_enabled() -> None:
    """The finaliser of a forgotten engine may run in the middle of `acquire`, in the thread that holds the lock."""
    with observers._lock:
        observers._restore_if_unused()
    user = Stack(2)
    observers.acquire(user)
    try:
        assert observers._originals, "what was watched is watched"
    finally:
        observers.release(user)
    assert not observers._originals
