"""Contract 11: ranks that share a denoiser call decide alike; ranks with prompts of their own never communicate."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp

import cachekit as ck

from ..toys import Stack
from .rank_worker import SCENARIOS, STEPS, WORLD, work

LONGEST = 300.0
"""Seconds after which two processes that wait for each other are given up."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank saw in every scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    started = mp.spawn(work, args=(str(folder),), nprocs=WORLD, join=False)
    deadline = time.monotonic() + LONGEST
    while not started.join(timeout=1.0):
        if time.monotonic() > deadline:
            for process in started.processes:
                process.kill()
            pytest.fail("the ranks wait for each other")
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(WORLD)]


def both(ranks: list[dict[str, Any]], name: str) -> tuple[Any, Any]:
    """What the two ranks saw in a scenario; fails with the traceback of one that failed."""
    errors = [each[key]["error"] for each in ranks for key in each if "error" in each[key]]
    assert not errors, errors[0]
    return ranks[0][name], ranks[1][name]


def test_all_scenarios_ran(ranks: list[dict[str, Any]]) -> None:
    both(ranks, "alone")
    assert [set(each) for each in ranks] == [set(SCENARIOS)] * WORLD


def test_the_largest_score_decides_for_all(ranks: list[dict[str, Any]]) -> None:
    alone, together = both(ranks, "alone"), both(ranks, "together")
    assert alone[0]["pattern"] != alone[1]["pattern"], "otherwise nothing is shown"
    assert [each["ranks"] for each in alone] == [1, 1]
    assert together[0]["pattern"] == together[1]["pattern"]
    assert "." in together[0]["pattern"]
    assert "#" in together[0]["pattern"][1:4]
    assert "#" in together[0]["pattern"][5:]
    assert together[0]["scores"] == together[1]["scores"]
    asked = [(a, b) for a, b in zip(together[0]["local"], together[1]["local"], strict=True) if a is not None]
    assert [max(pair) for pair in asked] == [score for score in together[0]["scores"] if score is not None]
    assert any(a != b for a, b in asked)
    assert "decided by 2 ranks together" in together[0]["text"]


def test_one_value_is_read_back_for_a_decision(ranks: list[dict[str, Any]]) -> None:
    for alone in both(ranks, "together"):
        # The comparison of timesteps reads one more: a bare denoiser has no scheduler.
        assert alone["syncs"] == 2 * STEPS


def test_threshold_0_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    assert all(each["equal"] for each in both(ranks, "nothing_skipped"))


def test_what_is_no_number_on_one_rank_computes_on_all(ranks: list[dict[str, Any]]) -> None:
    for each in both(ranks, "no_number"):
        # At the steps with timesteps 5 and 2, and once more since the bad signal is no reference.
        assert each["pattern"] == "#..##.##"
        assert any("finite" in note for note in each["notes"])


def test_an_objection_of_one_rank_holds_for_all(ranks: list[dict[str, Any]]) -> None:
    first, second = both(ranks, "one_objects")
    assert first["pattern"] == second["pattern"] == "#...#..."
    assert "weights" in second["reasons"][4]
    assert "another of the ranks" in first["reasons"][4]


def test_accumulated_scores_stay_the_same(ranks: list[dict[str, Any]]) -> None:
    first, second = both(ranks, "accumulated")
    assert first["local"] != second["local"]
    assert first["scores"] == second["scores"]
    assert first["pattern"] == second["pattern"]
    assert {"#", "."} <= set(first["pattern"][1:])


def test_samples_are_not_told_apart(ranks: list[dict[str, Any]]) -> None:
    first, second = both(ranks, "samples")
    assert first["pattern"] == second["pattern"]
    assert first["samples"] == 0
    assert any("several ranks share the calls" in note for note in first["notes"])


def test_known_decisions_ask_nobody(ranks: list[dict[str, Any]]) -> None:
    first, second = both(ranks, "planned")
    assert first == second
    for found in first.values():
        assert found["asked"] == 0
        assert "." in found["pattern"]


def test_ranks_with_prompts_of_their_own_never_communicate(ranks: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(both(ranks, "own_prompts")):
        assert each["collectives"] == 0
        for name in ("first_block", "seacache"):
            assert each[name] == {"calls": 5 + 4 * rank, "ranks": 1}


def test_tokens_spread_by_diffusers(ranks: list[dict[str, Any]]) -> None:
    first, second = both(ranks, "context_parallel")
    assert first["spread"] < 1e-5, "both ranks together draw what one draws"
    for name in ("first_block", "seacache", "taylorseer"):
        assert first[name]["pattern"] == second[name]["pattern"]
        assert {"#", "."} <= set(first[name]["pattern"])
    assert first["first_block"]["ranks"] == 2
    assert any(a != b for a, b in zip(first["first_block"]["local"], second["first_block"]["local"], strict=True))
    assert first["seacache"]["asked"] == STEPS
    assert first["taylorseer"]["asked"] == 0
    for name in ("seacache", "taylorseer"):
        assert first[name]["image"] == second[name]["image"], "the ranks end with the same picture"
    for each in (first, second):
        assert each["never"]
        assert each["restored"]


def test_spread_weights(ranks: list[dict[str, Any]]) -> None:
    for name in ("tensor_parallel", "sharded_weights"):
        first, second = both(ranks, name)
        assert first["ranks"] == second["ranks"] == 2
        assert first["pattern"] == second["pattern"]
        assert {"#", "."} <= set(first["pattern"][1:])
    assert both(ranks, "sharded_weights")[0]["local"] != both(ranks, "sharded_weights")[1]["local"]


def test_a_group_that_is_none_is_refused_and_nothing_is_enabled() -> None:
    model = Stack()
    with pytest.raises(TypeError, match="process group"):
        ck.enable_cache(model, "first_block", group=[0, 1])
    assert not ck.is_cache_enabled(model)
