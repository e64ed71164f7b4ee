"""Recommending on a tiny real pipeline: everything compared on prompts that nothing was tuned on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cachekit as ck
from cachekit.calibration import recommend as _recommend
from cachekit.calibration.split import halves, split

from .tuning import PROMPTS, tiny_flux

STEPS = 6
NAMES = ["first_block", "taylorseer", "schedule", "deepcache"]


@pytest.fixture(scope="module")
def flux() -> tuple[Any, dict[str, Any]]:
    return tiny_flux()


@pytest.fixture(scope="module")
def found(flux: tuple[Any, dict[str, Any]]) -> ck.Recommendation:
    pipe, arguments = flux
    told = {"num_inference_steps": STEPS, "progress": False, **arguments}
    return ck.recommend(pipe, PROMPTS, speedup=1.5, strategies=NAMES, evaluations=4, **told)


def test_all_that_reach_the_cost_are_compared(found: ck.Recommendation, flux: tuple[Any, dict[str, Any]]) -> None:
    names = [item.setting.name for item in found.compared]
    assert {"taylorseer", "schedule", "fewer steps"} <= set(names)
    assert found.about["prompts"] == 2
    assert all(len(item.pictures) == 2 for item in found.compared)
    means = [item.mean for item in found.compared]
    assert means == sorted(means, reverse=True)
    assert found.control is not None
    assert found.control.setting.config is None
    assert found.best is not None
    assert found.best.mean == max(item.mean for item in found.compared if item.setting.config is not None)
    assert not ck.is_cache_enabled(flux[0])
    ck.enable_cache(flux[0], found.config).disable()


def test_what_is_refused_is_said(found: ck.Recommendation) -> None:
    assert "no UNet" in found.refused["deepcache"]
    assert "deepcache: refused: " in str(found)


def test_the_report(found: ck.Recommendation, tmp_path: Path) -> None:
    text = str(found)
    assert "2 held-back prompts" in text
    assert f"caching is {'' if found.worth_it else 'not '}worth it: " in text
    assert "fewer steps: " in text
    saved = json.loads(found.save(tmp_path / "found.json").read_text())
    assert saved["worth_it"] == found.worth_it
    assert [item["setting"] for item in saved["compared"]] == [item.setting.label for item in found.compared]


def test_nothing_reaches_it(flux: tuple[Any, dict[str, Any]]) -> None:
    pipe, arguments = flux
    told = {"num_inference_steps": 2, "progress": False, **arguments}
    result = ck.recommend(pipe, PROMPTS[:2], speedup=30, strategies=["taylorseer", "first_block"], **told)
    assert result.best is None
    assert not result.worth_it
    assert "leaves nothing to choose" in result.refused["taylorseer"]
    with pytest.raises(ValueError, match="no cache reaches speed-up 30x"):
        _ = result.config
    assert "little to reuse" in str(result)


def test_a_profile_decides_which_prompts_are_new(flux: tuple[Any, dict[str, Any]]) -> None:
    pipe, arguments = flux
    told = {"progress": False, **arguments}
    profile = ck.calibrate(pipe, PROMPTS, STEPS, budgets=[3, 4], evaluations=0, held_back=0.3, **told)
    parts = split(pipe, profile, PROMPTS, None, arguments)
    assert (len(parts.known), len(parts.judged), parts.steps) == (2, 2, STEPS)
    assert set(parts.known).isdisjoint(parts.judged)
    others = split(pipe, profile, ["new", "newer"], None, arguments)
    assert (others.known, others.judged) == ((), ("new", "newer"))
    result = ck.recommend(pipe, profile, PROMPTS, speedup=1.5, strategies=["schedule"], **told)
    assert result.about["prompts"] == 2
    assert result.best is not None
    assert "schedule: computed_steps=4" in str(result)


def test_the_known_prompts_are_those_that_calibration_ran(
    flux: tuple[Any, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cachekit.calibration.runs import Batch

    pipe, arguments = flux
    ran: list[list[str]] = []
    original = Batch.run_uncached

    def spy(self: Batch) -> None:
        ran.append(list(self.prompts))
        original(self)

    monkeypatch.setattr(Batch, "run_uncached", spy)
    texts = [f"prompt {i}" for i in range(7)]
    profile = ck.calibrate(pipe, texts, 4, budgets=[2], evaluations=0, progress=False, **arguments)
    assert list(split(pipe, profile, texts, None, arguments).known) == ran[0]


def test_halves() -> None:
    assert halves(["a", "b"], 0.01) == (["a"], ["b"]) or halves(["a", "b"], 0.01) == (["b"], ["a"])
    known, judged = halves([str(i) for i in range(10)], 0.3)
    assert (len(known), len(judged)) == (7, 3)
    with pytest.raises(ValueError, match="at least two prompts"):
        halves(["a"], 0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategies": ["nothing"], "speedup": 2}, "unknown strategy"),
        ({"held_back": 1.0, "speedup": 2}, "held_back"),
        ({"speedup": 2, "min_psnr": 30}, "exactly one"),
    ],
    ids=str,
)
def test_bad_input(flux: tuple[Any, dict[str, Any]], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ck.recommend(flux[0], PROMPTS, progress=False, **settings)


def test_it_is_exported() -> None:
    assert ck.recommend is _recommend
