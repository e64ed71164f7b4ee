"""DeepCache: which steps compute, what runs in between, on UNets of every shape; and models that are no UNet."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cachekit as ck
from cachekit.strategies.deepcache import centred_steps

from ..toy_unet import ToyUNet, noise
from ..toys import Stack, bare_loop, pattern, prompt, reasons

SHAPES: dict[str, Callable[[], ToyUNet]] = {
    "three levels": lambda: ToyUNet(3),
    "two levels": lambda: ToyUNet(2),
    "two levels, no middle": lambda: ToyUNet(2, middle=False),
    "four levels, no middle": lambda: ToyUNet(4, middle=False),
    "in place": lambda: ToyUNet(3, in_place=True),
    "in place, own skips": lambda: ToyUNet(3, in_place=True, own_skips=True),
    "in place, two levels, no middle": lambda: ToyUNet(2, middle=False, in_place=True),
}
every_shape = pytest.mark.parametrize("build", SHAPES.values(), ids=SHAPES)


@torch.no_grad()
def loop(model: ToyUNet, steps: int = 9, **options: Any) -> list[torch.Tensor]:
    x = options.pop("x", None)
    return bare_loop(model, steps, x=noise() if x is None else x, **options)


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# which steps


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "#..#..#.."),
        ({"cache_interval": 1}, "#########"),
        ({"cache_interval": 4}, "#...#...#"),
        ({"disable_cache_before_step": 3}, "###..#..#"),
        ({"disable_cache_before_step": 0}, "#..#..#.."),
        ({"disable_cache_after_step": 5}, "#..#.####"),
        ({"centre": 4, "power": 1.0, "num_inference_steps": 9}, "#..#..#.."),
    ],
)
@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_steps(fields: dict[str, Any], expected: str) -> None:
    model = ToyUNet()
    with ck.cached(model, "deepcache", **fields):
        loop(model)
        assert pattern(model) == expected


def test_steps_around_a_centre() -> None:
    model = ToyUNet()
    with ck.cached(model, "deepcache", cache_interval=4, centre=6, power=2.0, num_inference_steps=20):
        loop(model, 20)
        # start = -sqrt(6), end = sqrt(14), five points: x = -2.449, -1.211, 0.027, 1.265, 2.503.
        assert [step for step, mark in enumerate(pattern(model)) if mark == "#"] == [0, 5, 6, 8, 12]


def test_centred_steps_by_hand() -> None:
    # start = 0, end = 10: x = 0, 2, 4, 6, 8.
    assert sorted(centred_steps(100, 5, 0, 2.0)) == [0, 4, 16, 36, 64]
    # start = -(36 ** 0.5) = -6, end = 8: x = -6, -4, -2, 0, 2, 4, 6.
    assert sorted(centred_steps(100, 7, 36, 2.0)) == [0, 20, 32, 36, 40, 52, 72]


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 20, 50])
@pytest.mark.parametrize("power", [1.0, 1.4, 3.0, 10.0])
@pytest.mark.parametrize("centre", [0, 5, 15, 49, 200])
def test_centred_steps_are_as_many_as_asked(steps: int, power: float, centre: int) -> None:
    for interval in (1, 2, 3, 5):
        computed = -(-steps // interval)
        chosen = sorted(centred_steps(steps, computed, centre, power))
        assert len(chosen) == computed
        assert chosen[0] == 0
        assert chosen[-1] < steps


def test_centred_steps_are_dense_around_the_centre() -> None:
    chosen = sorted(centred_steps(50, 10, 15, 1.4))
    gaps = [b - a for a, b in itertools.pairwise(chosen)]
    nearest = min(range(len(gaps)), key=lambda i: abs(chosen[i] - 15))
    assert gaps[nearest] == min(gaps)
    assert gaps[-1] > gaps[nearest]


def test_a_centre_without_a_number_of_steps_computes_and_says_so() -> None:
    model = ToyUNet()
    with ck.cached(model, "deepcache", centre=4):
        loop(model)
        assert pattern(model) == "#" * 9
        assert "num_inference_steps" in reasons(model)[4]
        with pytest.warns(ck.CacheWarning, match="num_inference_steps"):
            loop(model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache_interval": 0}, "cache_interval"),
        ({"branch_depth": 0}, "branch_depth"),
        ({"power": 0.5}, "power"),
        ({"center": 3}, "centre"),
        ({"num_inference_steps": 20}, "set centre"),
    ],
)
def test_bad_configs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ck.ConfigError, match=message):
        ck.DeepCacheConfig(**fields)


# what runs


@every_shape
def test_the_deep_part_runs_on_a_third_of_the_steps(build: Callable[[], ToyUNet]) -> None:
    model = build()
    depth = len(model.down_blocks)
    deep = len(model.calls) - 2
    with ck.cached(model, "deepcache"):
        loop(model)
        assert model.calls == [9, *[3] * deep, 9]
        for level in range(2, depth + (model.mid_block is not None)):
            ck.disable_cache(model)
            before = model.calls
            ck.enable_cache(model, "deepcache", branch_depth=level)
            loop(model)
            ran = [after - b for after, b in zip(model.calls, before, strict=True)]
            assert ran == [*[9] * level, *[3] * (len(ran) - 2 * level), *[9] * level]


@every_shape
@pytest.mark.parametrize("size", [(8, 8), (7, 5), (9, 16)])
def test_contracts(build: Callable[[], ToyUNet], size: tuple[int, int]) -> None:
    """Nothing to skip changes no bit, equal runs are equal, frozen inputs are exact, disabling restores."""
    x = noise(1, *size)
    base = loop(build(), x=x)
    for depth in (1, 2):
        model = build()
        if depth == len(model.down_blocks) and model.mid_block is None:
            continue
        with ck.cached(model, "deepcache", cache_interval=1, branch_depth=depth):
            assert equal(loop(model, x=x), base)
        with ck.cached(model, "deepcache", branch_depth=depth):
            first = loop(model, x=x)
            assert pattern(model) == "#..#..#.."
            assert equal(loop(model, x=x), first)
            assert not equal(first, base)
            assert equal(first[::3], base[::3])
            loop(model, 4, x=noise(2, 6, 11))
            assert equal(loop(model, x=x), first)
        assert equal(loop(model, x=x), base)


@every_shape
@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("strategy", ["deepcache", "first_block", "taylorseer"])
def test_frozen_inputs_are_exact(build: Callable[[], ToyUNet], strategy: str, inference: bool) -> None:
    """Also what the deep part writes into a skip connection of the part that always runs."""
    fields: dict[str, Any] = {"first_block": {"threshold": 1e-3}, "taylorseer": {"cache_interval": 3}}.get(strategy, {})
    x, time = noise(), torch.tensor(5.0)
    with torch.inference_mode(inference), torch.no_grad(), ck.cached(build(), strategy, **fields):
        expected = build()(x, time)[0]
    model = build()
    with torch.inference_mode(inference), torch.no_grad(), ck.cached(model, strategy, **fields):
        outputs = [model(x, time)[0].clone() for _ in range(8)]
        assert ck.stats(model).reused >= 3
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


def test_a_block_that_begins_to_write_in_place_is_noticed() -> None:
    """Its input was not copied, so that one computed call is not kept; the next one is."""
    model = ToyUNet(3, own_skips=True)
    with ck.cached(model, "deepcache", cache_interval=2) as handle:
        loop(model, 4)
        for block in (*model.down_blocks, *model.up_blocks):
            block.in_place = True
        with pytest.warns(ck.CacheWarning, match="write into their input"):
            loop(model, 8)
        assert pattern(model) == "###.#.#."
        assert handle.stats().reused == 3
        x, time = noise(), torch.tensor(5.0)
        with torch.no_grad():
            first, *others = [model(x, time)[0].clone() for _ in range(6)]
    with torch.no_grad():
        torch.testing.assert_close(first, ToyUNet(3, in_place=True, own_skips=True)(x, time)[0])
    for output in others:
        torch.testing.assert_close(output, first)


def test_guidance_in_two_calls_equals_one_batch() -> None:
    model = ToyUNet()
    conditions = [{"encoder_hidden_states": prompt(seed)} for seed in (1, 2)]
    with ck.cached(model, "deepcache"):
        two = loop(model, conditions=conditions)
        assert pattern(model, "cond") == pattern(model, "uncond") == "#..#..#.."
        both = {"encoder_hidden_states": torch.cat([prompt(1), prompt(2)])}
        one = loop(model, conditions=[both], x=noise().expand(2, -1, -1, -1))
        assert pattern(model) == "#..#..#.."
    for step, output in enumerate(one):
        for branch, part in enumerate(output.chunk(2)):
            torch.testing.assert_close(part, two[2 * step + branch])


def test_another_prompt_computes() -> None:
    model = ToyUNet()
    held = prompt(1)

    def at_step(step: int) -> None:
        if step == 4:
            held.copy_(prompt(2))

    with ck.cached(model, "deepcache", cache_interval=9):
        outputs = loop(model, conditions=[{"encoder_hidden_states": held}], at_step=at_step)
        assert pattern(model) == "#...#...."
    plain = loop(ToyUNet(), conditions=[{"encoder_hidden_states": prompt(2)}])
    assert torch.equal(outputs[4], plain[4])


def test_another_dtype_computes() -> None:
    model = ToyUNet()
    with ck.cached(model, "deepcache", cache_interval=9), torch.no_grad():
        for step in range(6):
            if step == 3:
                model.double()
            x = noise().double() if step >= 3 else noise()
            assert model(x, torch.tensor(float(9 - step)))[0].dtype == x.dtype
        assert pattern(model) == "#..#.."


def test_a_failed_run_leaves_nothing_behind() -> None:
    model = ToyUNet()

    def explode(*_: Any) -> None:
        raise KeyboardInterrupt

    with ck.cached(model, "deepcache"):
        clean = loop(model)

        def at_step(step: int) -> None:
            if step == 3:
                bomb.append(model.down_blocks[2].register_forward_pre_hook(explode))

        bomb: list[Any] = []
        with pytest.raises(KeyboardInterrupt):
            loop(model, at_step=at_step)
        bomb[0].remove()
        assert equal(loop(model), clean)


@pytest.mark.parametrize(("dtype", "size"), [(None, 4), (torch.bfloat16, 2)])
def test_memory_is_one_result_of_the_deep_part(dtype: torch.dtype | None, size: int) -> None:
    """The deep part's last block returns half the sides; skipped blocks leave one zero for each of their tensors."""
    model = ToyUNet()
    with ck.cached(model, "deepcache", cache_dtype=dtype):
        loop(model)
        result = noise().numel() // 4 * size
        assert result <= ck.stats(model).last.peak_bytes <= result + 4 * len(model.calls)


# where it cannot work


def test_other_models_are_refused_with_what_to_use_instead() -> None:
    model = Stack(4)
    with pytest.raises(ck.UnsupportedModelError, match="first_block"):
        ck.enable_cache(model, "deepcache")
    assert not ck.is_cache_enabled(model)


@pytest.mark.parametrize(("build", "most"), [(lambda: ToyUNet(3), 3), (lambda: ToyUNet(3, middle=False), 2)])
def test_a_depth_out_of_range_names_the_range(build: Callable[[], ToyUNet], most: int) -> None:
    model = build()
    with pytest.raises(ck.UnsupportedModelError, match=f"1 to {most}, got {most + 1}"):
        ck.enable_cache(model, "deepcache", branch_depth=most + 1)
    assert not ck.is_cache_enabled(model)
    ck.enable_cache(model, "deepcache", branch_depth=most).disable()


def test_update_changes_the_steps_but_not_the_site() -> None:
    model = ToyUNet()
    with ck.cached(model, "deepcache") as handle:
        handle.update(cache_interval=4)
        loop(model)
        assert pattern(model) == "#...#...#"
        with pytest.raises(ValueError, match="disable"):
            handle.update(branch_depth=2)


def test_a_copy_is_plain() -> None:
    model = ToyUNet()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ck.cached(model, "deepcache"):
            loop(model)
            twin = copy.deepcopy(model)
    assert not ck.is_cache_enabled(twin)
    assert equal(loop(twin), loop(ToyUNet()))
