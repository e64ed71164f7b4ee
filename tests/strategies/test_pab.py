"""Pyramid Attention Broadcast: what is handed on when, per type, per branch, inside the window."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

import cachekit as ck
from cachekit.engine.attention import attention_kinds
from cachekit.engine.clock import View
from cachekit.engine.history import Entry, History
from cachekit.engine.rules import GateContext, Verdict
from cachekit.strategies import to_config
from cachekit.strategies.gates import WindowGate

from ..attention_toys import Attention, Video, video_latents, video_prompt
from ..pipelines.tiny import TINY
from ..toys import Stack, bare_loop

PAB = ck.PyramidAttentionBroadcastConfig
EVERYWHERE = (-1, 1001)
TIMES = [torch.tensor(950.0 - 100 * step) for step in range(10)]
pytestmark = pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")


def wide(**ranges: int) -> ck.PyramidAttentionBroadcastConfig:
    """Skip ranges of the named types, at every noise level."""
    fields: dict[str, Any] = {}
    for kind, value in ranges.items():
        fields[f"{kind}_attention_block_skip_range"] = value
        fields[f"{kind}_attention_timestep_skip_range"] = EVERYWHERE
    return PAB(**fields)


def loop(model: nn.Module, *prompts: Tensor, times: Any = TIMES, x: Tensor | None = None) -> list[Tensor]:
    conditions = [{"encoder_hidden_states": prompt} for prompt in prompts or (video_prompt(),)]
    return bare_loop(model, x=video_latents() if x is None else x, times=times, conditions=conditions)


def pattern(target: Any, kind: str, branch: str = "cond") -> str:
    run = ck.stats(target).last
    assert run is not None
    return "".join("." if d.reused else "#" for d in run.of(branch) if d.part == f"{kind} attention")


def decision(step: int, now: float | None, computed: int, **gate: Any) -> Verdict:
    history = History(1)
    history.push(Entry(computed))
    view = View(0, step, 10, "scheduler", level=now)
    fields = {"interval": 2, "window": (100, 800), **gate}
    return WindowGate(**fields).decide(GateContext(view, "cond", history, None, float))


@pytest.mark.parametrize(
    ("level", "reused"), [(900, False), (800, False), (799.9, True), (100.1, True), (100, False), (None, False)]
)
def test_the_ends_of_the_window_compute(level: float | None, reused: bool) -> None:
    assert decision(5, level, 4).reuse == reused


def test_the_interval_counts_from_the_last_computed_step() -> None:
    assert [decision(step, 500, 3, interval=3).reuse for step in (4, 5, 6, 9)] == [True, True, False, False]
    assert not decision(4, 500, 3, interval=1).reuse


def test_the_callback_tells_the_level_as_it_is() -> None:
    assert decision(5, 900, 4, level=lambda: 500).reuse
    assert not decision(5, 500, 4, level=lambda: torch.tensor(900)).reuse
    assert not decision(5, 500, 4, level=lambda: None).reuse


def test_each_type_at_its_own_rate() -> None:
    model = Video()
    with ck.cached(model, wide(spatial=2, temporal=3, cross=6)) as handle:
        loop(model)
        assert pattern(model, "spatial") == "#.#.#.#.#."
        assert pattern(model, "temporal") == "#..#..#..#"
        assert pattern(model, "cross") == "#.....#..."
        for kind in ("spatial", "temporal", "cross"):
            assert f"{kind} attention: 2 modules" in handle.report
    assert model.calls() == {"spatial": 5, "temporal": 4, "cross": 2}


UNIT = [time / 1000 for time in TIMES]
RISING = [1 - time / 1000 for time in TIMES]


@pytest.mark.parametrize("times", [TIMES, UNIT, RISING], ids=["thousand", "unit", "rising"])
def test_the_default_window_on_every_scale(times: Any) -> None:
    """Levels 950, 850, ..., 50: those between 100 and 800 may reuse, counted from the step at 850."""
    model = Video()
    with ck.cached(model, PAB(2)):
        loop(model, times=times)
        assert pattern(model, "spatial") == "##.#.#.#.#"
    assert model.calls() == {"spatial": 6, "temporal": 10, "cross": 10}


def test_a_reuse_hands_on_the_last_output_of_its_branch() -> None:
    model = Video(1)
    outputs: list[Tensor] = []
    model.blocks[0].two.register_forward_hook(lambda _, args, output: outputs.append(output.clone()))
    seen: list[Tensor] = []
    model.blocks[0].out.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    with ck.cached(model, wide(cross=2)):
        loop(model, video_prompt(1), video_prompt(2))
    assert len(outputs) == 10
    for step in range(0, 10, 2):
        cond, uncond = outputs[step], outputs[step + 1]
        assert not torch.equal(cond, uncond)
        assert torch.equal(seen[2 * step + 2], cond)
        assert torch.equal(seen[2 * step + 3], uncond)


def effect(tiny: Any, pipe: Any) -> Tensor:
    """What guidance does to the final latents."""
    guided, unguided = (tiny.call(pipe, steps=10, guidance=guidance) for guidance in (True, False))
    return (guided - unguided).flatten()


def agreement(plain: Tensor, cached: Tensor) -> tuple[float, float]:
    return float(torch.cosine_similarity(plain, cached, dim=0)), float(cached.norm() / plain.norm())


DOCUMENTED = {"spatial": 2, "temporal": 4, "cross": 6}
# With these random weights the difference of the two branches turns by 90 degrees from step to step when uncached.
ERRATIC = "flux2-klein"
TWO_CALLS = [name for name, tiny in TINY.items() if tiny.two_call_guidance and name != ERRATIC]


def documented(pipe: Any, tiny: Any) -> dict[str, Any]:
    """The usual ranges of all types that the denoisers have."""
    kinds = attention_kinds(getattr(pipe, tiny.denoisers[0]))
    return {f"{kind}_attention_block_skip_range": DOCUMENTED[kind] for kind in kinds}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("wan", "flux") else [pytest.mark.slow]) for name in TWO_CALLS]
)
def test_guidance_survives_on_two_calls(name: str) -> None:
    tiny, pipe = TINY[name], TINY[name].build()
    plain = effect(tiny, pipe)
    with ck.cached(pipe, PAB(**documented(pipe, tiny))) as handle:
        cosine, ratio = agreement(plain, effect(tiny, pipe))
        assert handle.stats().reused > 0
    assert cosine >= 0.9
    assert 0.9 <= ratio <= 1.1


def test_guidance_does_not_survive_where_branches_share() -> None:
    """The measure above tells: diffusers' own hook hands one branch's attention to the other."""
    tiny, pipe = TINY["wan"], TINY["wan"].build()
    plain = effect(tiny, pipe)
    config = diffusers.PyramidAttentionBroadcastConfig(
        **documented(pipe, tiny), current_timestep_callback=lambda: pipe.current_timestep
    )
    pipe.transformer.enable_cache(config)
    cosine, ratio = agreement(plain, effect(tiny, pipe))
    pipe.transformer.disable_cache()
    assert cosine < 0.9 or not 0.9 <= ratio <= 1.1


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "spatial_attention_block_skip_range.*temporal_attention_block_skip_range.*cross_attention_block_skip_range"),
    ({"spatial_attention_block_skip_range": 0}, "spatial_attention_block_skip_range"),
    ({"spatial_attention_block_skip_range": 2.5}, "spatial_attention_block_skip_range"),
    ({"cross_attention_timestep_skip_range": (800, 100)}, "cross_attention_timestep_skip_range.*start < end"),
    ({"cross_attention_timestep_skip_range": (100,)}, "cross_attention_timestep_skip_range"),
    ({"cross_attention_timestep_skip_range": (float("nan"), 1)}, "cross_attention_timestep_skip_range"),
    ({"spatial_attention_block_identifiers": "blocks"}, "spatial_attention_block_identifiers"),
    ({"spatial_attention_block_identifiers": ("(",)}, "spatial_attention_block_identifiers"),
    ({"spatial_attention_block_identifiers": ()}, "spatial_attention_block_identifiers"),
    ({"current_timestep_callback": 5}, "current_timestep_callback"),
    ({"spatial_skip_range": 2}, "did you mean"),
]


@pytest.mark.parametrize(("fields", "match"), BAD, ids=[str(fields) for fields, _ in BAD])
def test_bad_values_name_the_field(fields: dict[str, Any], match: str) -> None:
    needed = {} if not fields else {"temporal_attention_block_skip_range": 2}
    with pytest.raises(ck.ConfigError, match=match):
        PAB(**needed, **fields)


def test_diffusers_config_is_translated() -> None:
    def now() -> int:
        return 5

    theirs = diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        cross_attention_timestep_skip_range=(0, 900),
        temporal_attention_block_identifiers=("time_blocks",),
        current_timestep_callback=now,
    )
    assert to_config(theirs, {}) == PAB(
        2,
        cross_attention_timestep_skip_range=(0, 900),
        temporal_attention_block_identifiers=("time_blocks",),
        current_timestep_callback=now,
    )
    with pytest.raises(ck.ConfigError, match="skip_range"):
        to_config(diffusers.PyramidAttentionBroadcastConfig(), {})


def test_field_names_and_defaults_are_those_of_diffusers() -> None:
    theirs, ours = diffusers.PyramidAttentionBroadcastConfig(2), PAB(2)
    for name, value in vars(theirs).items():
        assert getattr(ours, name) == (None if name.endswith("identifiers") else value), name


@pytest.mark.parametrize(("kind", "has"), [("temporal", "spatial"), ("cross", "spatial")])
def test_a_type_that_the_model_does_not_have(kind: str, has: str) -> None:
    pipe = TINY["flux"].build()
    with pytest.raises(ck.UnsupportedModelError, match=rf"no {kind} attention; it has {has} \(\d+ modules"):
        ck.enable_cache(pipe, wide(**{kind: 2, "spatial": 2}))
    assert not ck.is_cache_enabled(pipe)


def test_a_model_without_attention() -> None:
    with pytest.raises(ck.UnsupportedModelError, match="no attention"):
        ck.enable_cache(Stack(2), wide(spatial=2))


def hooked(config: ck.PyramidAttentionBroadcastConfig) -> dict[str, list[str]]:
    from cachekit.strategies.pab import attention_modules

    return {kind: list(paths) for kind, paths in attention_modules(config, Video()).items()}


def test_identifiers_choose_among_the_attention_of_a_type() -> None:
    assert hooked(PAB(2, spatial_attention_block_identifiers=("blocks.1",), cross_attention_block_skip_range=2)) == {
        "spatial": ["blocks.1.one", "blocks.1.temporal"],
        "cross": ["blocks.0.two", "blocks.1.two"],
    }
    fields: dict[str, Any] = {"temporal_attention_block_skip_range": 2}
    assert hooked(PAB(2, spatial_attention_block_identifiers=(r"blocks\.1",), **fields)) == {
        "spatial": ["blocks.1.one"],
        "temporal": ["blocks.0.temporal", "blocks.1.temporal"],
    }


def test_identifiers_know_better_than_the_sorting() -> None:
    fields: dict[str, Any] = {"temporal_attention_block_skip_range": 2}
    assert hooked(PAB(2, temporal_attention_block_identifiers=(r"0\.one$",), **fields)) == {
        "spatial": ["blocks.1.one"],
        "temporal": ["blocks.0.one"],
    }
    assert hooked(PAB(cross_attention_block_skip_range=2, cross_attention_block_identifiers=("one$",))) == {
        "cross": ["blocks.0.one", "blocks.1.one"]
    }


def test_identifiers_that_find_nothing_say_what_there_is() -> None:
    config = PAB(2, spatial_attention_block_identifiers=("layers",))
    with pytest.raises(ck.UnsupportedModelError, match=r"spatial_attention_block_identifiers.*blocks\.0\.one"):
        ck.enable_cache(Video(), config)


def test_rates_and_windows_can_be_changed_types_cannot() -> None:
    model = Video()
    with ck.cached(model, wide(spatial=2)) as handle:
        handle.update(spatial_attention_block_skip_range=5)
        loop(model)
        assert pattern(model, "spatial") == "#....#...."
        with pytest.raises(ValueError, match="enable_cache"):
            handle.update(cross_attention_block_skip_range=2)


def test_holds_one_output_per_attention_and_branch() -> None:
    model = Video()
    per_attention = video_latents().nbytes
    with ck.cached(model, wide(spatial=2, temporal=2, cross=2)):
        loop(model)
        assert ck.stats(model).last.peak_bytes == 6 * per_attention
        loop(model, video_prompt(1), video_prompt(2))
        assert ck.stats(model).last.peak_bytes == 12 * per_attention
    with ck.cached(model, PAB(2, cache_dtype=torch.bfloat16)):
        loop(model)
        assert ck.stats(model).last.peak_bytes == 2 * per_attention // 2


def test_kept_in_another_dtype_it_comes_back_in_the_models() -> None:
    """The projection behind the attention takes float32 only."""
    model = Video()
    base = loop(model)
    with ck.cached(model, wide(cross=2).replaced(cache_dtype=torch.bfloat16)):
        outputs = loop(model)
    assert outputs[-1].dtype == torch.float32
    assert torch.allclose(outputs[1], base[1], atol=0.2)


class Pruned(Video):
    """Drops half of the tokens from the fourth step on, which no argument of the call shows."""

    def forward(self, hidden_states: Tensor, timestep: Any, *args: Any, **kwargs: Any) -> tuple[Tensor]:
        keep = 2 if float(timestep) < 700 else 4
        return super().forward(hidden_states[:, :, :keep], timestep, *args, **kwargs)


def test_an_output_of_another_shape_is_not_handed_on() -> None:
    base, model = loop(Pruned()), Pruned()
    with ck.cached(model, wide(spatial=9, temporal=9, cross=9)):
        outputs = loop(model)
        assert pattern(model, "spatial") == "#..#......"
    assert torch.equal(outputs[3], base[3])
    assert [output.shape for output in outputs] == [output.shape for output in base]


def test_what_is_kept_is_not_written_to() -> None:
    """The model writes into what the attention returned."""
    model = Video(1)
    block = model.blocks[0]
    block.out.register_forward_pre_hook(lambda _, args: (args[0].add_(1.0),))
    seen: list[Tensor] = []
    block.out.register_forward_hook(lambda _, args, output: seen.append(output.clone()))
    with ck.cached(model, wide(cross=10)):
        loop(model)
    assert all(torch.equal(output, seen[0]) for output in seen)


def test_other_prompts_sizes_and_batches_between_runs() -> None:
    model = Video()
    with ck.cached(model, wide(spatial=3, temporal=3, cross=3)):
        first = loop(model)
        loop(model, video_prompt(3))
        loop(model, x=video_latents(tokens=7))
        loop(model, video_prompt(batch=2), x=video_latents(2))
        assert all(torch.equal(a, b) for a, b in zip(first, loop(model), strict=True))


def test_a_prompt_overwritten_in_place_half_way_computes() -> None:
    model, prompt = Video(), video_prompt()

    def swap(step: int) -> None:
        if step == 4:
            prompt.copy_(video_prompt(9))

    with ck.cached(model, wide(cross=9)):
        bare_loop(model, x=video_latents(), times=TIMES, conditions=[{"encoder_hidden_states": prompt}], at_step=swap)
        assert pattern(model, "cross") == "#...#....."


def test_an_unknown_level_computes_and_says_so() -> None:
    model = Video()
    times = [torch.tensor(50_000.0 - 1000 * step) for step in range(6)]
    with ck.cached(model, PAB(2)):
        loop(model, times=times)
        assert pattern(model, "spatial") == "######"
        assert "noise level" in str(ck.stats(model))
    with ck.cached(model, PAB(2, current_timestep_callback=lambda: 500)):
        loop(model, times=times)
        assert pattern(model, "spatial") == "#.#.#."


def test_attention_of_own_classes_is_found() -> None:
    assert isinstance(Video().blocks[0].one, Attention)
    assert not isinstance(Video().blocks[0].one, diffusers.models.attention.AttentionModuleMixin)
