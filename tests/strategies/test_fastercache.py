"""FasterCache: frequency weights, extrapolated attention, both parts together, guidance that survives."""

from __future__ import annotations

from functools import cache
from typing import Any

import diffusers
import pytest
import torch
from diffusers.hooks.faster_cache import _split_low_high_freq
from torch import Tensor, nn

import cachekit as ck
from cachekit.engine.clock import View
from cachekit.engine.history import Entry, History
from cachekit.engine.rules import GateContext
from cachekit.strategies import find_strategy, strategy_named, to_config
from cachekit.strategies.fastercache import AttentionGate, Extrapolate, FrequencyWeights, low_frequencies
from cachekit.strategies.gates import WindowGate

from ..attention_toys import Video, video_latents, video_prompt
from ..pipelines.tiny import TINY
from ..toys import Stack, bare_loop

EVERYWHERE = (-1, 1001)
TIMES = [torch.tensor(950.0 - 100 * step) for step in range(10)]
pytestmark = pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")


def wide(**fields: Any) -> ck.FasterCacheConfig:
    """Every rule at every noise level."""
    return ck.FasterCacheConfig(
        spatial_attention_timestep_skip_range=EVERYWHERE,
        temporal_attention_timestep_skip_range=EVERYWHERE,
        unconditional_batch_timestep_skip_range=EVERYWHERE,
        **fields,
    )


def loop(model: nn.Module, branches: int = 2, **options: Any) -> list[Tensor]:
    conditions = [{"encoder_hidden_states": video_prompt(seed)} for seed in range(branches)]
    return bare_loop(model, x=video_latents(), times=TIMES, conditions=conditions, **options)


def pattern(target: Any, part: str, branch: str = "cond") -> str:
    run = ck.stats(target).last
    assert run is not None
    return "".join("." if item.reused else "#" for item in run.of(branch) if item.part == part)


def at(step: int, steps: int | None = 10, level: float | None = 500) -> View:
    return View(0, step, steps, "scheduler", level=level)


# config


def test_defaults_are_those_of_diffusers() -> None:
    theirs, ours = diffusers.FasterCacheConfig(), ck.FasterCacheConfig()
    for name, value in vars(theirs).items():
        if not name.endswith("identifiers"):
            assert getattr(ours, name) == value, name


def test_the_config_of_diffusers_is_accepted() -> None:
    theirs = diffusers.FasterCacheConfig(
        spatial_attention_block_skip_range=3, tensor_format="BFCHW", current_timestep_callback=lambda: 500
    )
    ours = to_config(theirs, {})
    assert find_strategy(ours).name == "fastercache"
    assert (ours.spatial_attention_block_skip_range, ours.tensor_format) == (3, "BFCHW")
    assert ours.spatial_attention_block_identifiers is None
    theirs.spatial_attention_block_identifiers = ("attn2",)
    assert to_config(theirs, {}).spatial_attention_block_identifiers == ("attn2",)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("unconditional_batch_skip_range", 0),
        ("spatial_attention_block_skip_range", 0),
        ("tensor_format", "BSC"),
        ("unconditional_batch_timestep_skip_range", (641, -1)),
        ("alpha_low_frequency", float("nan")),
        ("spatial_attention_block_identifiers", ("(",)),
    ],
)
def test_bad_values_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(ck.ConfigError, match=field):
        ck.FasterCacheConfig(**{field: value})


def test_a_type_that_the_model_lacks_is_refused_only_when_it_was_asked_for() -> None:
    with ck.cached(Stack(), ck.FasterCacheConfig()) as handle:
        assert "attention" not in handle.report
    with pytest.raises(ck.UnsupportedModelError, match="no temporal attention"):
        ck.enable_cache(TINY["sd3"].build(), ck.FasterCacheConfig(temporal_attention_block_skip_range=2))
    with pytest.raises(ck.UnsupportedModelError, match="left alone"):
        ck.enable_cache(Stack(), ck.FasterCacheConfig(is_guidance_distilled=True))


@pytest.mark.parametrize("other", [ck.FirstBlockCacheConfig(0.1), ck.TaylorSeerCacheConfig(3)])
@pytest.mark.parametrize("turned", [False, True])
def test_two_that_skip_are_refused(other: ck.CacheConfig, turned: bool) -> None:
    pair = [ck.FasterCacheConfig(), other]
    with pytest.raises(ck.CacheConflictError, match="fastercache"):
        ck.enable_cache(Video(), pair[::-1] if turned else pair)


# frequencies


@pytest.mark.parametrize("height", [1, 3, 4, 5, 10, 16, 33])
@pytest.mark.parametrize("width", [3, 4, 5, 11, 16, 40])
def test_low_frequencies_are_those_of_diffusers(height: int, width: int) -> None:
    planes = torch.randn(2, 3, height, width)
    low, high = (torch.fft.ifft2(torch.fft.ifftshift(part)).real for part in _split_low_high_freq(planes.double()))
    if height > 1:  # theirs takes the radius from the shorter side also where that is one
        torch.testing.assert_close(low_frequencies(planes).double(), low, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close((planes - low_frequencies(planes)).double(), high, atol=1e-5, rtol=1e-5)


def test_the_split_is_inverted_exactly_and_weights_scale_their_part() -> None:
    planes = torch.randn(1, 4, 9, 12)
    low = low_frequencies(planes)
    one = FrequencyWeights(lambda now: 1.0, lambda now: 1.0)
    assert torch.equal(one.predict((0,), (planes,), at(1)), planes)
    both = FrequencyWeights(lambda now: 1.5, lambda now: 0.5)
    torch.testing.assert_close(both.predict((0,), (planes,), at(1)), 1.5 * low + 0.5 * (planes - low))
    constant = torch.ones(1, 1, 6, 7)
    torch.testing.assert_close(low_frequencies(constant), constant)
    row = torch.tensor([1.0, -1.0] * 8)[None, None, None]
    assert low_frequencies(row).abs().max() < 1e-6


def test_weights_apply_inside_their_windows() -> None:
    rules = strategy_named("fastercache").build(ck.FasterCacheConfig(), Stack())
    weights = rules[0].predictor
    assert isinstance(weights, FrequencyWeights)
    assert [weights.low(at(1, level=level)) for level in (950, 901, 900, 100, 99, None)] == [1, 1, 1.1, 1.1, 1, 1]
    assert [weights.high(at(1, level=level)) for level in (900, 301, 300, 0)] == [1, 1, 1.1, 1.1]


def test_weight_callbacks_are_given_the_denoiser_and_replace_the_windows() -> None:
    seen: list[nn.Module] = []

    def weight(module: nn.Module) -> float:
        seen.append(module)
        return 2.0

    model = Stack()
    config = wide(low_frequency_weight_callback=weight, high_frequency_weight_callback=weight)
    with ck.cached(model, config):
        outputs = bare_loop(model, times=TIMES, conditions=PAIR)
    assert set(map(id, seen)) == {id(model)}
    cond, uncond = outputs[2:4]
    first = bare_loop(Stack(), times=TIMES[:1], conditions=PAIR)
    torch.testing.assert_close(uncond - cond, 2 * (first[1] - first[0]))


PAIR: list[dict[str, Any]] = [{"encoder_hidden_states": torch.full((1, 2, 8), float(seed))} for seed in (1, 3)]


# attention


def test_extrapolation_rises_from_nothing_to_the_whole_difference() -> None:
    new, old = torch.tensor([3.0]), torch.tensor([2.0])
    predict = Extrapolate().predict
    assert [float(predict((4, 2), (new, old), at(step))) for step in (0, 9)] == [3.0, 4.0]
    assert float(predict((4, 2), (new, old), at(5, steps=None, level=250))) == 3.75
    assert float(predict((4, 2), (new, old), at(5, steps=None, level=None))) == 3.5
    assert predict((4,), (new,), at(5)) is new
    assert torch.equal(predict((4, 2), (new, new.clone()), at(7)), new)


def test_the_attention_weight_callback_is_given_the_module() -> None:
    seen: list[nn.Module] = []

    def weight(module: nn.Module) -> float:
        seen.append(module)
        return 0.25

    model = Video()
    with ck.cached(model, wide(attention_weight_callback=weight, is_guidance_distilled=True)):
        loop(model, branches=1)
    paths = {path for path, module in model.named_modules() if any(module is item for item in seen)}
    assert paths == {"blocks.0.one", "blocks.1.one"}


def test_attention_computes_when_the_difference_is_learnt() -> None:
    gate, history = AttentionGate(WindowGate(3, EVERYWHERE)), History(2)
    history.push(Entry(4))
    for refreshes in (False, True):
        context = GateContext(at(5), "cond", history, None, float, refreshes=refreshes)
        assert gate.decide(context).reuse is not refreshes


def test_both_branches_compute_attention_on_full_steps_and_the_rest_is_predicted() -> None:
    model = Video()
    with ck.cached(model, wide(unconditional_batch_skip_range=5)):
        loop(model)
        assert pattern(model, "guidance", "uncond") == "#....#...."
        assert pattern(model, "spatial attention") == "#.#.##.#.#"
        assert pattern(model, "spatial attention", "uncond") == "##"


@pytest.mark.parametrize("distilled", [True, False])
def test_one_branch_has_the_attention_part_only(distilled: bool) -> None:
    model = Video()
    with ck.cached(model, wide(temporal_attention_block_skip_range=3, is_guidance_distilled=distilled)):
        loop(model, branches=1)
        assert pattern(model, "spatial attention") == "#.#.#.#.#."
        assert pattern(model, "temporal attention") == "#..#..#..#"


def test_half_a_batch_uses_its_half_of_what_the_whole_batch_left() -> None:
    """The two styles of guidance take the same decisions here and give the same outputs."""
    model = Video()
    config = wide(unconditional_batch_skip_range=4, temporal_attention_block_skip_range=2)
    with ck.cached(model, config, branches=("cond", "uncond")):
        two = loop(model)
        both = {"encoder_hidden_states": torch.cat([video_prompt(0), video_prompt(1)])}
        one = bare_loop(model, x=torch.cat([video_latents()] * 2), times=TIMES, conditions=[both])
        assert ck.stats(model).reused == 7
    for step, output in enumerate(one):
        torch.testing.assert_close(output, torch.cat(two[2 * step : 2 * step + 2]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batched", [False, True])
def test_only_the_attention_of_one_branch_is_kept(batched: bool) -> None:
    """Two outputs of each module; of the guidance pair a difference, and with two calls the first one's output."""
    model = Video()
    with ck.cached(model, wide(), branches=("cond", "uncond")):
        if batched:
            both = {"encoder_hidden_states": torch.cat([video_prompt(0), video_prompt(1)])}
            bare_loop(model, x=torch.cat([video_latents()] * 2), times=TIMES, conditions=[both])
        else:
            loop(model)
        size, spatial = video_latents().nbytes, 2
        assert ck.stats(model).bytes_held == 2 * spatial * size + (1 if batched else 2) * size


def test_frozen_inputs_are_exact_with_weights_of_one() -> None:
    model = Video()
    config = wide(alpha_low_frequency=1.0, alpha_high_frequency=1.0, temporal_attention_block_skip_range=2)
    conditions = [{"encoder_hidden_states": video_prompt(seed)} for seed in range(2)]
    with ck.cached(model, config) as handle:
        outputs = bare_loop(model, x=video_latents(), times=[torch.tensor(500.0)] * 6, move=0.0, conditions=conditions)
        assert handle.stats().reused > 0
    for index, output in enumerate(outputs):
        torch.testing.assert_close(output, outputs[index % 2], rtol=1e-5, atol=1e-5)


def test_switched_off_it_changes_no_bit_and_disabling_restores() -> None:
    model = Video()
    base = loop(model)
    with ck.cached(model, wide(unconditional_batch_skip_range=1, spatial_attention_block_skip_range=1)):
        assert all(torch.equal(a, b) for a, b in zip(loop(model), base, strict=True))
    with ck.cached(model, wide()):
        first = loop(model)
        assert all(torch.equal(a, b) for a, b in zip(loop(model), first, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(loop(model), base, strict=True))


# guidance survives


@cache
def effect(name: str, cached: bool) -> tuple[Tensor, Tensor]:
    """What a change of the guidance scale does to the final latents, and these."""
    tiny = TINY[name]
    pipe = tiny.build()
    scale = tiny.guided["guidance_scale"]
    if cached:
        ck.enable_cache(pipe, ck.FasterCacheConfig())
    weak, strong = (tiny.call(pipe, steps=20, guidance_scale=1 + share * (scale - 1)) for share in (0.4, 1.0))
    if cached:
        assert ck.stats(pipe).reused > 0
        ck.disable_cache(pipe)
    return strong - weak, strong


@pytest.mark.parametrize("name", ["wan", "sd3"])
def test_guidance_survives_at_the_defaults(name: str) -> None:
    """Two calls (Wan) and one call on a doubled batch (SD3)."""
    (plain, wanted), (ours, output) = effect(name, False), effect(name, True)
    assert not torch.equal(output, wanted)
    assert torch.nn.functional.cosine_similarity(ours.flatten(), plain.flatten(), dim=0) >= 0.9
    assert 0.9 <= ours.norm() / plain.norm() <= 1.1
