"""Several strategies on one denoiser: what goes together, what does not, and that order never matters."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cachekit as ck
from cachekit.api import _engines
from cachekit.engine.sites import PassContext, Site, SitePass
from cachekit.strategies import strategy_named

from ..conformance import checks
from ..conformance.cases import cases, run
from ..shipped import shipped_strategies
from ..text_toys import CrossStack, counted_linears, noise, text
from ..toys import bare_loop, pattern

CASES = {case.name: case for case in cases()}
SKIPPING: dict[str, checks.Config] = {
    settings.name: settings.always for settings in checks.STRATEGIES.values() if not settings.lossless
}
SKIPPING["first_block"] = ck.FirstBlockCacheConfig(0.4)  # some calls skip, some do not
ORDERS = ["text first", "text last", "text later", "other later"]


def enable(model: nn.Module, order: str, other: ck.CacheConfig) -> None:
    """Both caches on `model`, in one of the ways a user may write it."""
    mine = ck.TextKVCacheConfig()
    given: list[Any] = [[mine, other], [other, mine], [other], [mine]]
    ck.enable_cache(model, given[ORDERS.index(order)])
    if order.endswith("later"):
        ck.enable_cache(model, mine if order == "text later" else other)


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("other", SKIPPING)
@pytest.mark.parametrize(
    ("name", "order"),
    [*(("wan-t2v", order) for order in ORDERS), ("z-image", ORDERS[0]), ("unet-2d-condition", ORDERS[1])],
)
@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_text_kv_changes_no_bit_of_another_cache(name: str, other: str, order: str) -> None:
    case, model = CASES[name], CASES[name].build()
    config = checks.config_for(SKIPPING[other], model)
    try:
        ck.enable_cache(model, config)
    except ck.UnsupportedModelError:
        pytest.skip(f"{other} does not work on this model")
    ck.disable_cache(model)
    base = run(case, model, checks.STEPS)
    with ck.cached(model, config):
        alone = [run(case, model, checks.STEPS) for _ in range(2)]
        decisions = pattern(model)
    enable(model, order, config)
    both = [run(case, model, checks.STEPS) for _ in range(2)]
    stats = ck.stats(model)
    assert same(both[0], alone[0])
    assert same(both[1], alone[1])
    assert pattern(model) == decisions, "the skipping strategy comes first in the statistics"
    mine = stats.of("text_kv")[""].last
    assert mine is not None
    assert mine.projections_reused > 0
    ck.disable_cache(model, "text_kv")
    assert not ck.stats(model).of("text_kv")
    assert same(run(case, model, checks.STEPS), alone[0])
    ck.disable_cache(model)
    assert same(run(case, model, checks.STEPS), base)


@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_the_other_cache_can_be_taken_out() -> None:
    model, conditions = CrossStack(4), [{"encoder_hidden_states": text()}]
    base = bare_loop(model, 8, noise(), conditions=conditions)
    ck.enable_cache(model, [ck.TextKVCacheConfig(), ck.FirstBlockCacheConfig(1e9)])
    bare_loop(model, 8, noise(), conditions=conditions)
    ck.disable_cache(model, "first_block")
    assert [item.strategy for item in ck.stats(model).all] == ["text_kv"]
    with counted_linears(model) as counts:
        assert same(bare_loop(model, 8, noise(), conditions=conditions), base)
        assert counts["blocks.3.attn.to_k"] < 8
    ck.disable_cache(model)


@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_text_kv_that_joins_while_blocks_are_skipped_learns_from_a_call_that_is_computed() -> None:
    """In a call with skipped blocks most of the model is not seen, and predicted results look constant."""
    model, conditions = CrossStack(4), [{"encoder_hidden_states": text()}]
    skips = ck.TaylorSeerCacheConfig(3, disable_cache_before_step=1)
    with ck.cached(model, skips):
        alone = bare_loop(model, 12, noise(), conditions=conditions)

    def joins(step: int) -> None:
        if step == 4:
            ck.enable_cache(model, "text_kv")

    ck.enable_cache(model, skips)
    assert same(bare_loop(model, 12, noise(), conditions=conditions, at_step=joins), alone)
    assert same(bare_loop(model, 12, noise(), conditions=conditions), alone)
    mine = ck.stats(model).of("text_kv")[""].last
    assert mine is not None
    assert mine.projections_reused > 0
    ck.disable_cache(model)


def test_a_model_that_is_called_with_other_arguments_than_the_root_reuses_nothing() -> None:
    """A strategy that computes only one half of a guidance batch is no reason to hand out keys for both."""

    class HalfPass(SitePass):
        def around(self, inner: Any, args: Any, kwargs: Any) -> Any:
            (half,) = inner(args[0][:1], args[1], encoder_hidden_states=kwargs["encoder_hidden_states"][:1])
            return (torch.cat([half, half]),)

        def finish(self) -> None:
            return None

    class HalfSite(Site):
        rank = 0

        def begin(self, branch: str, context: PassContext) -> SitePass:
            context.decide(None)
            return HalfPass()

        def describe(self) -> str:
            return "half"

    model = CrossStack()
    base = bare_loop(model, 6, noise(1), conditions=[{"encoder_hidden_states": text(batch=1)}])
    conditions = [{"encoder_hidden_states": text().expand(2, -1, -1).clone()}]
    with ck.cached(model, "text_kv"):
        bare_loop(model, 6, noise(1).expand(2, -1, -1).clone(), conditions=conditions)
        engine = _engines[model]
        part = engine.members[0].parts[0]
        foreign = type(part)(part.member, part.rule, HalfSite())
        engine._parts = (foreign, part)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ck.CacheWarning)
            outputs = bare_loop(model, 6, noise(1).expand(2, -1, -1).clone(), conditions=conditions)
        engine._parts = (part,)
    for output, expected in zip(outputs, base, strict=True):
        torch.testing.assert_close(output[:1], expected)


SHIPPED = (
    "deepcache",
    "fastercache",
    "first_block",
    "magcache",
    "pab",
    "schedule",
    "seacache",
    "taylorseer",
    "text_kv",
)


def _example(name: str) -> ck.CacheConfig:
    """A config of a strategy that needs nothing from the user."""
    return next(iter(strategy_named(name).example_configs().values()))


def attempt(model: nn.Module, configs: list[Any]) -> str:
    """Why these cannot be enabled together; "" when they can. Nothing stays enabled."""
    try:
        ck.enable_cache(model, configs)
    except ck.CacheConflictError as error:
        assert not ck.is_cache_enabled(model)
        return str(error).split(";")[0]
    assert ck.is_cache_enabled(model)
    ck.disable_cache(model)
    return ""


def test_pairs_are_of_all_strategies() -> None:
    assert tuple(shipped_strategies()) == SHIPPED


@pytest.mark.parametrize("pair", list(itertools.combinations(SHIPPED, 2)), ids=" + ".join)
def test_every_pair_works_or_is_refused_for_the_same_reason_in_both_orders(pair: tuple[str, str]) -> None:
    model = CASES["unet-2d-condition" if "deepcache" in pair else "wan-t2v"].build()
    first, second = map(_example, pair)
    reasons = {attempt(model, [first, second]), attempt(model, [second, first])}
    for one, other in ((first, second), (second, first)):
        ck.enable_cache(model, one)
        try:
            ck.enable_cache(model, other)
            reasons.add("")
        except ck.CacheConflictError as error:
            reasons.add(str(error).split(";")[0])
        ck.disable_cache(model)
    assert len(reasons) == 1
    assert (reasons == {""}) == ("text_kv" in pair)
    if "text_kv" not in pair:
        (reason,) = reasons
        assert all(name in reason for name in pair), "the reason names both"
    assert not any("_compiled_call_impl" in module.__dict__ for module in model.modules())
