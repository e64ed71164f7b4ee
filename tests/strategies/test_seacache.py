"""SeaCache: the filter, the gate, where the noise level comes from, and what happens when something is missing."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.hooks.sea_cache import _apply_sea_filter
from torch import Tensor, nn

import cachekit as ck
from cachekit.engine.clock import View
from cachekit.engine.fields import Channels
from cachekit.engine.history import History
from cachekit.engine.noise import TimeScale
from cachekit.engine.rules import GateContext
from cachekit.strategies.seacache import Seen, SpectralGate, relative_changes, sea_filter

from ..pipelines.tiny import TINY
from ..toys import (
    Stack,
    SyncsPerCall,
    ToyPipeline,
    bare_loop,
    latents,
    of_time,
    pattern,
    prompt,
    reasons,
    toy_pipeline,
)

# Thresholds here are so high that the cap decides, which is warned of.
pytestmark = pytest.mark.filterwarnings("ignore:.*only the cap:cachekit.CacheWarning")
CAP = "#..#..##"


def scores(target: Any, branch: str | None = None) -> list[float | None]:
    run = ck.stats(target).last
    assert run is not None
    return [decision.score for decision in (run.decisions if branch is None else run.of(branch))]


# the filter


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("shape", [(4, 1, 8, 8), (3, 5, 7, 9), (2, 4, 1, 6), (1, 1, 1, 1)])
def test_the_filter_is_that_of_diffusers(shape: tuple[int, ...], noise: float) -> None:
    field = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = _apply_sea_filter(field.movedim(0, -1), sigma=noise, power_exp=3.0).movedim(-1, 0)
    torch.testing.assert_close(sea_filter(field[None], noise, 3.0)[0], expected, rtol=2e-4, atol=2e-5)


def test_one_frame_is_an_image() -> None:
    image = torch.randn(2, 4, 7, 5)
    torch.testing.assert_close(sea_filter(image, 0.4, 3.0), sea_filter(image[:, :, None], 0.4, 3.0)[:, :, 0])


def test_without_noise_all_frequencies_pass() -> None:
    line = torch.randn(2, 3, 9)
    torch.testing.assert_close(sea_filter(line, 0.0, 3.0), line)


def test_noise_takes_the_details_first() -> None:
    """Of a coarse and a fine wave the fine one is damped more, and the more so the more noise there is."""
    places = torch.arange(32.0)
    coarse, fine = (torch.cos(2 * math.pi * count * places / 32)[None, None] for count in (1, 14))
    kept = [
        float(sea_filter(fine, noise, 3.0).abs().max() / sea_filter(coarse, noise, 3.0).abs().max())
        for noise in (0.1, 0.5, 0.9)
    ]
    assert 1.0 > kept[0] > kept[1] > kept[2] > 0.0


def test_the_mean_gain_is_one() -> None:
    """A single point excites all frequencies alike; what is left at the point is the mean gain."""
    for shape in ((9,), (8, 6), (3, 5, 4)):
        point = torch.zeros(1, 1, *shape)
        point[(0, 0, *(0,) * len(shape))] = 1.0
        assert float(sea_filter(point, 0.6, 3.0).max()) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_filtered_in_float32(dtype: torch.dtype) -> None:
    field = torch.randn(1, 2, 5, 7).to(dtype)
    filtered = sea_filter(field, 0.5, 3.0)
    assert filtered.dtype == torch.float32
    torch.testing.assert_close(filtered, sea_filter(field.float(), 0.5, 3.0))
    large = torch.full((1, 1, 64, 64), 60000.0, dtype=torch.float16)
    assert sea_filter(large, 0.5, 3.0).isfinite().all()


def test_vectors_have_no_spectrum_and_are_copied() -> None:
    vector = torch.randn(2, 12)
    filtered = sea_filter(vector, 0.9, 3.0)
    assert torch.equal(filtered, vector)
    assert filtered.data_ptr() != vector.data_ptr()


# relative changes


def seen(*groups: tuple[Tensor, ...], raw: tuple[tuple[Tensor, ...], ...] | None = None) -> Seen:
    marks = tuple(tuple(field.flatten(1).sum(dim=1) for field in group) for group in raw or groups)
    return Seen(tuple(groups), (), marks, None, {}, "")


def test_every_sample_has_its_own_change() -> None:
    before = torch.full((3, 2, 4), 2.0)
    after = before + torch.tensor([0.0, 0.5, 2.0])[:, None, None]
    changes = relative_changes(seen((before,)), seen((after,)))
    assert changes is not None
    assert changes.tolist() == pytest.approx([0.0, 0.25, 1.0])


def test_a_batch_of_two_equal_halves_is_one_of_them() -> None:
    before, after = torch.randn(1, 3, 6), torch.randn(1, 3, 6)
    single = relative_changes(seen((before,)), seen((after,)))
    double = relative_changes(seen((before.repeat(2, 1, 1),)), seen((after.repeat(2, 1, 1),)))
    assert single is not None
    assert double is not None
    torch.testing.assert_close(double, single.repeat(2))


def test_a_list_of_samples_is_a_batch() -> None:
    before, after = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    listed = relative_changes(
        seen(*((item[None],) for item in before.unbind())), seen(*((item[None],) for item in after.unbind()))
    )
    batch = relative_changes(seen((before,)), seen((after,)))
    assert listed is not None
    assert batch is not None
    torch.testing.assert_close(listed, batch)


def test_what_stands_still_is_no_part_of_the_output() -> None:
    """A reference image keeps its bits, but not its filtered form, since the filter follows the noise."""
    image, hint = torch.ones(1, 2, 4), torch.randn(1, 2, 4)
    changes = relative_changes(seen((image, hint)), seen((1.5 * image, 3.0 * hint), raw=((1.5 * image, hint),)))
    assert changes is not None
    assert changes.tolist() == pytest.approx([0.5])
    frozen = relative_changes(seen((image, hint)), seen((image, 3.0 * hint), raw=((image, hint),)))
    assert frozen is not None
    assert frozen.tolist() == pytest.approx([1.0]), "where everything stands still everything counts"


def test_other_shapes_cannot_be_compared() -> None:
    field = torch.ones(1, 2, 4)
    assert relative_changes(seen((field,)), seen((torch.ones(1, 2, 5),))) is None
    assert relative_changes(seen((field,)), seen((field,), (field,))) is None
    assert relative_changes(seen((field,)), seen((field, field))) is None


# the gate


FALLING = TimeScale(1000.0, rising=False)


def asked(x: Tensor, carry: Any, step: int = 1, scale: TimeScale | None = FALLING, **now: Any) -> GateContext:
    view = View(0, step, None, "timestep", **{"timestep": 500.0, "scale": scale, **now})
    return GateContext(view, "cond", History(1), None, float, {"hidden_states": x}, carry)


def gate(threshold: float = 0.25, **fields: Any) -> SpectralGate:
    config = ck.SeaCacheConfig(threshold, **fields)
    return SpectralGate(config, ("hidden_states",), Channels(), lambda: None)


def test_changes_add_up_until_a_computed_step() -> None:
    """Constant latents pass the filter whole, so 1.0, 1.1, 1.21, ... change by 0.1 at every step."""
    x, subject = torch.ones(1, 4, 6), gate(0.25)
    carry = subject.attend(asked(x, None, step=0))
    found = []
    for step in range(1, 7):
        verdict = subject.decide(asked(x * 1.1**step, carry, step))
        carry = verdict.carry
        found.append((verdict.reuse, round(verdict.score or 0.0, 4)))
    assert found == [(True, 0.1), (True, 0.2), (False, 0.3), (True, 0.1), (True, 0.2), (False, 0.3)]


def test_a_step_that_a_guard_computed_starts_the_sum_again() -> None:
    x, subject = torch.ones(1, 4, 6), gate(0.25)
    carry = subject.attend(asked(x, None, step=0))
    carry = subject.decide(asked(x * 1.1, carry, 1)).carry
    carry = subject.attend(asked(x * 1.21, carry, 2))
    assert subject.decide(asked(x * 1.331, carry, 3)).score == pytest.approx(0.1, abs=1e-4)


def test_reuse_only_below_the_threshold() -> None:
    x = torch.ones(1, 4, 6)
    assert not gate(0.0).decide(asked(x, gate().attend(asked(x, None)))).reuse
    assert gate(1e-9).decide(asked(x, gate().attend(asked(x, None)))).reuse


def test_the_gate_keeps_nothing() -> None:
    x, subject = torch.randn(1, 4, 6), gate()
    carry = subject.attend(asked(x, None))
    first = subject.decide(asked(x * 1.1, carry))
    subject.decide(asked(torch.randn(1, 4, 6), carry))
    assert subject.decide(asked(x * 1.1, carry)).score == first.score
    assert carry.total == 0.0


def test_a_rising_run_is_filtered_again_once_it_is_known_to_rise() -> None:
    """The first call cannot tell: its level is 1 - 0.1 when the second one turns out to have a higher timestep."""
    first, second = torch.randn(1, 4, 16), torch.randn(1, 4, 16)
    carry = gate().attend(asked(first, None, 0, None, timestep=0.1))
    now = asked(second, carry, 1, TimeScale(0.4, rising=True), timestep=0.4)
    before, after = (sea_filter(x.mT, noise, 3.0) for x, noise in ((first, 0.9), (second, 0.6)))
    expected = float((after - before).abs().mean() / before.abs().mean())
    assert gate().decide(now).score == pytest.approx(expected, rel=1e-4)
    falling = asked(second, carry, 1, TimeScale(0.1, rising=False), timestep=0.05)
    assert gate().decide(falling).score != pytest.approx(expected, rel=1e-2)


# where the noise level comes from

SCHEDULERS = {
    "FlowMatchEulerDiscreteScheduler": "sigmas",
    "FlowMatchHeunDiscreteScheduler": "sigmas",
    "EulerDiscreteScheduler": "sigmas",
    "EulerAncestralDiscreteScheduler": "sigmas",
    "HeunDiscreteScheduler": "sigmas",
    "KDPM2DiscreteScheduler": "alphas_cumprod",
    "DPMSolverMultistepScheduler": "sigmas",
    "DPMSolverSinglestepScheduler": "sigmas",
    "UniPCMultistepScheduler": "sigmas",
    "EDMEulerScheduler": "sigmas",
    "DDIMScheduler": "alphas_cumprod",
    "DDPMScheduler": "alphas_cumprod",
    "PNDMScheduler": "alphas_cumprod",
    "LCMScheduler": "alphas_cumprod",
    "TCDScheduler": "alphas_cumprod",
    "IPNDMScheduler": "amplitudes",
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning", "ignore::cachekit.CacheWarning")
def test_every_kind_of_scheduler(name: str) -> None:
    cls: Any = getattr(diffusers, name)
    pipe = ToyPipeline(Stack(3, of_time(torch.cos)), cls())
    with ck.cached(pipe, "seacache", threshold=1e9):
        for _ in range(2):
            pipe(8)
            told = {reason for reason in reasons(pipe) if "threshold" in reason}
            assert told == {f"accumulated change < threshold (noise level from the scheduler's {SCHEDULERS[name]})"}
            assert "." in pattern(pipe)
            assert pattern(pipe).endswith("#")
            assert pattern(pipe).count("...") == 0


def test_equal_noise_gives_equal_decisions_whatever_tells_it() -> None:
    """One trajectory of latents, once through flow matching's sigmas and once with the same shares from a callback."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(8)
    shares = scheduler.sigmas.tolist()
    pipe = ToyPipeline(Stack(2, of_time(torch.zeros_like)), scheduler)
    found = []
    with ck.cached(pipe, "seacache", threshold=1e9, max_consecutive_cached=0, cache_end_steps=0):
        pipe(8, advance=False)
        found.append(scores(pipe)[1:])
    calls = iter(shares)
    model = Stack(2, of_time(torch.zeros_like))
    x, outputs = latents(), []
    config = ck.SeaCacheConfig(1e9, max_consecutive_cached=0, sigma_callback=lambda *call: next(calls))
    with ck.cached(model, config), torch.no_grad():
        for step in range(8):
            outputs.append(model(x, torch.tensor(float(8 - step)))[0])
            x = x - outputs[-1] / 8
        found.append(scores(model)[1:])
        assert "noise level from sigma_callback" in reasons(model)[1]
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize(
    ("times", "told"),
    [
        ([900.0, 700.0, 500.0, 300.0, 100.0, 0.5], "the falling timestep"),
        ([0.9, 0.7, 0.5, 0.3, 0.2, 0.1], "the falling timestep"),
        ([0.0, 0.1, 0.4, 0.6, 0.8, 0.9], "the rising timestep"),
        ([0.5, 100.0, 400.0, 600.0, 800.0, 900.0], "the rising timestep"),
    ],
)
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_a_bare_denoiser_is_read_by_its_timestep(times: list[float], told: str, calls: int) -> None:
    conditions = [{"encoder_hidden_states": prompt(seed)} for seed in range(calls)]
    model = Stack(3)
    shares = [time / 1000 if max(times) > 1 else time for time in times]
    shares = [1 - share if "rising" in told else share for share in shares]
    given = iter([share for share in shares for _ in range(calls)])
    expected = Stack(3)
    loop: dict[str, Any] = {"times": [torch.tensor(time) for time in times], "conditions": conditions}
    with ck.cached(expected, ck.SeaCacheConfig(1e9, sigma_callback=lambda *call: next(given))):
        bare_loop(expected, **loop)
        wanted = scores(expected)
    with ck.cached(model, "seacache", threshold=1e9):
        bare_loop(model, **loop)
        first = [score is None for score in wanted]
        assert [score is None for score in scores(model)] == first
        assert [score or 0.0 for score in scores(model)] == pytest.approx([score or 0.0 for score in wanted], rel=1e-4)
        assert told in reasons(model)[-1]


# missing things


def warned(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(item.message) for item in caught if issubclass(item.category, ck.CacheWarning)]


def fails(*call: Any) -> Any:
    raise KeyError("vision")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"raw_vision_callback": lambda *call: None}, "raw_vision_callback gave no list"),
        ({"raw_vision_callback": lambda *call: [torch.ones(3)]}, "raw_vision_callback gave no list"),
        ({"raw_vision_callback": fails}, "raw_vision_callback failed: KeyError"),
        ({"sigma_callback": lambda *call: None}, "sigma_callback gave no share of noise"),
        ({"sigma_callback": lambda *call: 7.5}, "sigma_callback gave no share of noise"),
        ({"sigma_callback": lambda *call: math.nan}, "sigma_callback gave no share of noise"),
        ({"sigma_callback": fails}, "sigma_callback failed: KeyError"),
    ],
)
def test_missing_things_compute_and_are_said_once_a_run(fields: dict[str, Any], text: str) -> None:
    pipe = toy_pipeline()
    plain, outputs = pipe(8), list[Tensor]()
    with ck.cached(pipe, "seacache", threshold=1e9, **fields):
        for _ in range(2):
            messages = warned(lambda: pipe(8))
            assert sum(text in message and "nothing was reused" not in message for message in messages) == 1
            assert pattern(pipe) == "#" * 8
            assert any(text in reason for reason in reasons(pipe))
            assert any(text in note for note in ck.stats(pipe).last.notes)
        warned(lambda: outputs.append(pipe(8)))
        assert torch.equal(outputs[0], plain)


class Timeless(Stack):
    """Takes no latents in floating point and needs no timestep."""

    def forward(self, hidden_states: Tensor, timestep: Any = None, **more: Any) -> tuple[Tensor]:  # type: ignore[override]
        return super().forward(hidden_states.float(), 0.0 if timestep is None else timestep, **more)


@pytest.mark.parametrize(
    ("x", "text"),
    [(latents(), "neither a scheduler nor a timestep"), (latents().long(), "no latents among hidden_states")],
)
def test_no_timestep_or_no_latents(x: Tensor, text: str) -> None:
    model = Timeless(3)
    with ck.cached(model, "seacache", threshold=1e9), torch.no_grad():
        assert sum(text in message for message in warned(lambda: [model(x) for _ in range(5)])) <= 1
        assert pattern(model) == "#" * len(pattern(model))


def test_something_missing_for_one_call_only() -> None:
    """The next call has nothing to compare with, the one after it goes on."""
    calls = iter(range(99))
    config = ck.SeaCacheConfig(
        1e9, max_consecutive_cached=0, sigma_callback=lambda *call: None if next(calls) == 3 else 0.5
    )
    pipe = toy_pipeline()
    with ck.cached(pipe, config):
        with pytest.warns(ck.CacheWarning, match="sigma_callback"):
            pipe(8)
        assert pattern(pipe) == "#..##..#"


# callbacks


def test_raw_vision_callback_overrides() -> None:
    """What it gives stands still, so nothing is ever computed again; it gets the module and the arguments by name."""
    got: list[tuple[Any, Any, set[str]]] = []
    still = torch.randn(4, 2, 6, 5)

    def callback(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        got.append((module, args, set(kwargs)))
        return [still]

    config = ck.SeaCacheConfig(1e-6, max_consecutive_cached=0, raw_vision_callback=callback, sigma_callback=_half)
    pipe = toy_pipeline(change=of_time(torch.cos))
    with ck.cached(pipe, config):
        pipe(8)
        assert pattern(pipe) == "#......#"
        assert scores(pipe)[1:-1] == [0.0] * 6
    assert got[0] == (pipe.transformer, (), {"hidden_states", "timestep"})


def _half(*call: Any) -> float:
    return 0.5


def test_sigma_as_a_tensor_is_read_back_and_counted() -> None:
    pipe = toy_pipeline()
    with ck.cached(pipe, "seacache", threshold=1e9, sigma_callback=lambda *call: torch.tensor(0.5)):
        pipe(8)
        pipe(8)
        run = ck.stats(pipe).last
        assert run is not None
        assert [decision.syncs for decision in run.decisions] == [2 if score else 1 for score in scores(pipe)]


def test_diffusers_config_with_its_callback() -> None:
    theirs = diffusers.SeaCacheConfig(threshold=1e9, max_consecutive_cached=1, raw_vision_callback=lambda *call: None)
    pipe = toy_pipeline()
    handle = ck.enable_cache(pipe, theirs, sigma_callback=_half, raw_vision_callback=None)
    pipe(8)
    assert pattern(pipe) == "#.#.#.##"
    assert handle.config.raw_vision_callback is None
    assert ck.SeaCacheConfig() == ck.SeaCacheConfig(
        **{name: getattr(diffusers.SeaCacheConfig(), name) for name in vars(diffusers.SeaCacheConfig())}
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"threshold": -0.1},
        {"threshold": math.inf},
        {"residual_order": 2},
        {"retention_steps": -1},
        {"cache_end_steps": -1},
        {"max_consecutive_cached": -1},
        {"power_exp": 0.0},
        {"power_exp": math.nan},
        {"raw_vision_callback": "latents"},
        {"sigma_callback": 0.5},
        {"tresholds": 0.1},
    ],
)
def test_bad_values(fields: dict[str, Any]) -> None:
    with pytest.raises(ck.ConfigError, match=next(iter(fields))):
        ck.SeaCacheConfig(**fields)


# guards


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, CAP),
        ({"max_consecutive_cached": 0}, "#......#"),
        ({"max_consecutive_cached": 1}, "#.#.#.##"),
        ({"retention_steps": 0, "cache_end_steps": 0}, "#..#..#."),
        ({"retention_steps": 3, "max_consecutive_cached": 0}, "###....#"),
        ({"cache_end_steps": 3, "max_consecutive_cached": 0}, "#....###"),
        ({"cache_end_steps": 20}, "########"),
        ({"retention_steps": 20}, "########"),
        ({"threshold": 0.0}, "########"),
    ],
)
@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_guards(fields: dict[str, Any], expected: str) -> None:
    pipe = toy_pipeline(change=of_time(torch.cos))
    with ck.cached(pipe, ck.SeaCacheConfig(**{"threshold": 1e9, **fields})):
        for _ in range(2):
            pipe(8)
            assert pattern(pipe) == expected


def test_the_last_steps_of_an_image_to_image_run() -> None:
    pipe = toy_pipeline()
    with ck.cached(pipe, "seacache", threshold=1e9, max_consecutive_cached=0, cache_end_steps=2):
        pipe(8, begin=3)
        assert pattern(pipe) == "#..##"


@pytest.mark.parametrize(("order", "exact"), [(0, False), (1, True)])
def test_residual_order(order: int, exact: bool) -> None:
    """The change of the stack is linear in the step: order 1 is exact once two steps are computed."""
    model = Stack(4, of_time(lambda time: time / 8))
    times = [torch.tensor(float(8 - step)) for step in range(8)]
    plain = bare_loop(model, times=times)
    fields = {"threshold": 1e9, "retention_steps": 2, "residual_order": order}
    with ck.cached(model, "seacache", **fields):
        cached = bare_loop(model, times=times)
        assert pattern(model) == "##..#..#"
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(plain, cached, strict=True)) == exact


# beside diffusers' own hook


@pytest.mark.parametrize("threshold", [0.1, 0.25, 0.5, 1.0])
@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_decisions_are_those_of_diffusers_on_wan(threshold: float) -> None:
    """Where diffusers has the latents (Wan text to video, two calls a step), both compute the same steps."""
    tiny = TINY["wan"]
    ours, theirs = tiny.build(), tiny.build()
    counts: list[int] = []
    theirs.transformer.enable_cache(diffusers.SeaCacheConfig(threshold=threshold, max_consecutive_cached=3))
    theirs.transformer.blocks[-1].attn1.register_forward_pre_hook(lambda *call: counts.append(len(counts)))
    ran: list[bool] = []

    def note(*call: Any) -> None:
        ran.append(bool(counts))
        counts.clear()

    theirs.transformer.register_forward_hook(note)
    expected = tiny.call(theirs, steps=10)
    with ck.cached(ours, "seacache", threshold=threshold, max_consecutive_cached=3):
        output = tiny.call(ours, steps=10)
        assert pattern(ours) == "".join("#" if computed else "." for computed in ran)
        assert any(score for score in scores(ours))
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-3)


# what is read, held and left behind


@pytest.mark.parametrize("calls", [1, 2])
def test_one_read_back_per_decision(calls: int) -> None:
    conditions = [{"encoder_hidden_states": prompt(seed)} for seed in range(calls)]
    pipe = toy_pipeline(change=of_time(torch.cos))
    with ck.cached(pipe, "seacache", threshold=1e9):
        pipe(8, conditions=conditions)
        counts = SyncsPerCall(pipe, "transformer")(lambda: pipe(8, conditions=conditions))
        run = ck.stats(pipe).last
        assert run is not None
        assert [decision.syncs for decision in run.decisions] == [int(score is not None) for score in scores(pipe)]
        assert counts[calls:] == [int(score is not None) for score in scores(pipe)][calls:]


@pytest.mark.parametrize(("order", "deltas"), [(0, 1), (1, 2)])
def test_bytes_held(order: int, deltas: int) -> None:
    """One or two changes of the stack, and the filtered latents of the last call with a number for each sample."""
    pipe = toy_pipeline()
    with ck.cached(pipe, "seacache", threshold=1e9, residual_order=order):
        pipe(8)
        run = ck.stats(pipe).last
        assert run is not None
        assert run.peak_bytes == (deltas + 1) * latents().nbytes + 4
        assert ck.stats(pipe).bytes_held == 0


def test_latents_overwritten_in_place_do_not_reach_what_is_carried() -> None:
    def loop(in_place: bool) -> list[float | None]:
        model, x = Stack(3), latents()
        with ck.cached(model, "seacache", threshold=1e9, max_consecutive_cached=0), torch.no_grad():
            for step in range(6):
                x = x.mul_(1.5) if in_place else x * 1.5
                model(x, torch.tensor(float(6 - step)))
            return scores(model)

    assert loop(True) == loop(False)
    assert all(score for score in loop(True)[1:])


def test_the_denoiser_is_not_kept_alive() -> None:
    model = Stack(3)
    handle = ck.enable_cache(model, "seacache")
    bare_loop(model)
    alive = weakref.ref(model)
    handle.disable()
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_nan_computes_and_passes() -> None:
    """Bad latents in one step: that step and the next one compute, then all goes on."""
    model, x = Stack(3), latents()
    with ck.cached(model, "seacache", threshold=1e9, max_consecutive_cached=0), torch.no_grad():
        for step in range(8):
            model(torch.full_like(x, math.nan) if step == 3 else x + step, torch.tensor(float(8 - step)))
        assert pattern(model) == "#..##..."
        assert "not a finite number" in reasons(model)[3]


@pytest.mark.parametrize("batched", [False, True])
def test_both_styles_of_guidance_decide_alike(batched: bool) -> None:
    pipe = toy_pipeline(change=of_time(lambda time: time / 500))
    conditions = [{"encoder_hidden_states": prompt(seed)} for seed in range(2)]
    two, one = latents(), latents().repeat(2, 1, 1)
    both = [{"encoder_hidden_states": torch.cat([prompt(0), prompt(1)])}]
    with ck.cached(pipe, "seacache", threshold=0.3):
        pipe(12, x=one if batched else two, conditions=both if batched else conditions)
        found = [pattern(pipe, branch) for branch in ck.stats(pipe).last.branches]
    assert len(set(found)) == 1
    assert {"#", "."} == set(found[0])


def test_runs_do_not_leak() -> None:
    pipe = toy_pipeline(change=of_time(torch.cos))
    config = ck.SeaCacheConfig(0.5)

    def stop(pipeline: ToyPipeline, index: int) -> None:
        if index == 4:
            raise KeyboardInterrupt

    with ck.cached(pipe, config):
        first = pipe(10)
        decided = scores(pipe)
        with pytest.raises(KeyboardInterrupt):
            pipe(10, callback=stop)
        pipe(10, x=latents(tokens=7, batch=3))
        pipe(6, conditions=[{"encoder_hidden_states": prompt(5)}])
        assert torch.equal(pipe(10), first)
        assert scores(pipe) == decided


def test_a_change_of_the_prompt_computes_and_starts_again() -> None:
    pipe = toy_pipeline()

    def conditions(step: int) -> list[dict[str, Any]]:
        return [{"encoder_hidden_states": prompt(1 if step < 4 else 2)}]

    with ck.cached(pipe, "seacache", threshold=1e9, max_consecutive_cached=0):
        pipe(8, conditions=conditions)
        assert pattern(pipe) == "#...#..#"
        assert scores(pipe)[5] < scores(pipe)[3], "the sum begins with the new prompt"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_half_and_double_precision(dtype: torch.dtype) -> None:
    pipe = toy_pipeline()
    pipe.transformer.to(dtype)
    with ck.cached(pipe, "seacache", threshold=1e9):
        output = pipe(8, x=latents(dtype=dtype))
        assert pattern(pipe) == CAP
        assert output.dtype == dtype


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [
        *(("sd15", f"{name}Scheduler") for name in ("PNDM", "DDIM", "EulerDiscrete", "HeunDiscrete", "LCM")),
        *((name, None) for name in ("sdxl", "z-image", "qwen-image", "cogvideox")),
    ],
)
@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_real_pipelines(name: str, scheduler: str | None) -> None:
    tiny = TINY[name]
    pipe = tiny.build()
    if scheduler is not None:
        pipe.scheduler = getattr(diffusers, scheduler).from_config(pipe.scheduler.config)
    plain = tiny.call(pipe, steps=5)
    with ck.cached(pipe, "seacache", threshold=0.0):
        assert torch.equal(tiny.call(pipe, steps=5), plain)
        assert any(score for score in scores(pipe))
    with ck.cached(pipe, "seacache", threshold=1e9):
        first = tiny.call(pipe, steps=5)
        assert "." in pattern(pipe)
        assert torch.equal(tiny.call(pipe, steps=5), first)
        run = ck.stats(pipe).last
        assert run is not None
        assert max(decision.syncs for decision in run.decisions if decision.step) <= 1


def test_update_while_enabled() -> None:
    pipe = toy_pipeline()
    handle = ck.enable_cache(pipe, ck.SeaCacheConfig(1e9))
    pipe(8)
    handle.update(max_consecutive_cached=1)
    pipe(8)
    assert pattern(pipe) == "#.#.#.##"


def test_a_scheduler_of_variances_and_one_of_flows_in_turn() -> None:
    """The scheduler is replaced between runs; the noise level follows it."""
    pipe = toy_pipeline()
    with ck.cached(pipe, "seacache", threshold=1e9):
        pipe(8)
        pipe.scheduler = DDIMScheduler(clip_sample=False)
        pipe(8)
        assert "alphas_cumprod" in reasons(pipe)[1]
        pipe.scheduler = FlowMatchEulerDiscreteScheduler()
        pipe(8)
        assert "sigmas" in reasons(pipe)[1]
