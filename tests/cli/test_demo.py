"""`cachekit demo` end to end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import cachekit
from cachekit import zoo
from cachekit.demo import EVERY, Method, NotApplicable, Result, Sample, demo, remarks, render, spread, to_dict
from cachekit.demo.compute import StepCost, flops

from ..shipped import shipped_strategies
from .support import KNOWN, invoke, refused, use_tiny_pipeline

METHODS = ["uncached", "FirstBlock", "MagCache", "TaylorSeer", "fewer steps"]
APPLICABLE = ["FirstBlock", "MagCache", "TaylorSeer", "SeaCache", "Schedule", "PAB", "FasterCache"]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_pipeline(monkeypatch)


def draw(folder: Path, *arguments: str) -> dict[str, Any]:
    result = invoke("demo", "--out", str(folder), *arguments)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads((folder / "results.json").read_text())
    assert str(folder) in result.stdout.replace("\n", "")
    for name in METHODS:
        assert name in result.stdout
    return document


@pytest.mark.usefixtures("tiny")
def test_writes_a_grid_and_figures(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    document = draw(folder, "--prompts", "fox,../../zzz", "--prompts", "red heart", "--steps", "9", "--seed", "3")
    assert sorted(path.name for path in folder.iterdir()) == ["grid.png", "results.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    names = [row["name"] for row in document["methods"]]
    controls = {row["control_steps"] for row in document["methods"] if row["control_steps"]}
    assert names == METHODS[:-1] + ["fewer steps"] * len(controls)
    assert document["settings"]["prompts"] == ["fox", "../../zzz", "red heart"]
    assert all(len(row["samples"]) == 3 for row in document["methods"])
    with Image.open(folder / "grid.png") as grid:
        columns = (grid.width - 168) // 134
        rows = (grid.height - 34) // 134
    assert (columns, rows) == (3, len(names))


@pytest.mark.usefixtures("tiny")
def test_figures_say_what_was_computed(tmp_path: Path) -> None:
    document = draw(tmp_path, "--prompts", "fox", "--steps", "12")
    rows = {row["name"]: row for row in document["methods"]}
    seer = rows["TaylorSeer"]
    control = next(row for row in document["methods"] if row["steps"] == seer["control_steps"])
    assert seer["samples"][0]["computed"] == {"cond": 7, "uncond": 7}  # 0 1 2 4 6 8 10
    assert seer["samples"][0]["calls_per_branch"] == 12
    assert seer["peak_bytes"] > 0
    assert 0 < seer["psnr"]["worst"] < 100
    assert seer["ssim"]["worst"] < 1
    assert rows["uncached"]["psnr"] == {"mean": None, "worst": None, "identical": 1}
    assert 1 <= control["steps"] < 12
    assert control["samples"][0]["computed"] == {"": control["steps"]}
    assert control["peak_bytes"] == 0


@pytest.mark.usefixtures("tiny")
def test_all_draws_every_strategy_beside_a_control_of_its_cost(tmp_path: Path) -> None:
    document = draw(tmp_path, "--all", "--prompts", "fox", "--steps", "8")
    names = [row["name"] for row in document["methods"]]
    controls = [row for row in document["methods"] if row["name"] == "fewer steps"]
    assert names == ["uncached", *APPLICABLE, *["fewer steps"] * len(controls)]
    assert {item["name"]: item["reason"].split(";")[0] for item in document["not_applicable"]} == {
        "DeepCache": "FluxTransformer2DModel is no UNet with down_blocks and up_blocks of equal number, so it has no "
        "deep part",
        "TextKV": document["not_applicable"][1]["reason"].split(";")[0],
    }
    assert "nothing constant here" in document["not_applicable"][1]["reason"]
    taken = sorted({row["control_steps"] for row in document["methods"] if row["control_steps"]})
    assert [row["steps"] for row in controls] == taken
    assert len(taken) > 1
    for row in document["methods"]:
        if row["name"] in APPLICABLE:
            assert row["control_steps"] in (None, round(row["compute"]))
            assert (row["control_steps"] is None) == (round(row["compute"]) == 8)
            assert row["preparation"].startswith("calibrated on") == (row["name"] in ("MagCache", "Schedule"))
    with Image.open(tmp_path / "grid.png") as grid:
        assert (grid.height - 34) // 134 == len(names)


def test_all_means_every_strategy_that_ships() -> None:
    assert sorted(candidate.strategy for candidate in EVERY) == shipped_strategies()


@pytest.mark.usefixtures("tiny")
def test_cost_is_counted_in_uncached_steps() -> None:
    pipe = zoo.load("emoji-flux", device="cpu")
    cost = StepCost.of(pipe, "fox", 0)
    assert cost.steps(flops(pipe, "fox", 7, 0)) == 7
    schedule = cachekit.ScheduleCacheConfig((0, 2, 4))
    assert cost.steps(flops(pipe, "fox", 7, 0, schedule)) == 3  # a predicted denoiser multiplies nothing
    blocks = cachekit.TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1)
    assert 4 < cost.steps(flops(pipe, "fox", 7, 0, blocks)) < 5  # what stands around the blocks runs in every step
    assert not cachekit.is_cache_enabled(pipe)


def test_remarks_name_what_was_measured_and_what_is_missing() -> None:
    sample = Sample("fox", torch.zeros(3, 16, 16), 1.0, {"": 2}, 4)
    control = Result(Method("fewer steps", "control, 2 steps", 2), [sample])
    method = Method("MagCache", "", 4, cachekit.FirstBlockCacheConfig(), "calibrated on 2 prompts in 3 s")
    results = [Result(method, [sample], 2.25, control), control]
    assert remarks(results, [NotApplicable("DeepCache", "no UNet")]) == [
        "MagCache: calibrated on 2 prompts in 3 s",
        "operations on the first prompt, in uncached steps, which fewer steps match: MagCache 2.2",
        "not applicable: DeepCache: no UNet",
    ]
    assert remarks([control], []) == []


@pytest.mark.usefixtures("tiny")
def test_one_step_leaves_nothing_to_skip(tmp_path: Path) -> None:
    assert invoke("demo", "--out", str(tmp_path), "--prompts", "fox", "--steps", "1").exit_code == 0
    rows = json.loads((tmp_path / "results.json").read_text())["methods"]
    assert [row["name"] for row in rows] == METHODS[:-1], "no control can have fewer steps"
    assert [row["psnr"]["identical"] for row in rows] == [1] * 4


@pytest.mark.usefixtures("tiny")
def test_pipeline_is_left_without_a_cache() -> None:
    pipe = zoo.load("emoji-flux", device="cpu")
    drawn: list[int] = []
    run = demo(pipe, ["fox"], KNOWN, steps=4, seed=0)
    results = run.run(lambda text, count: drawn.append(count))
    assert not cachekit.is_cache_enabled(pipe)
    assert sum(drawn) == run.pictures == 1 + 2 + 3 + 5
    again = demo(pipe, ["fox"], KNOWN, steps=4, seed=0).run(lambda text, count: None)
    for first, second in zip(results, again, strict=True):
        assert torch.equal(first.samples[0].image, second.samples[0].image)


def test_calibration_prompts_are_not_those_that_are_drawn() -> None:
    assert set(demo(None, ["fox"], KNOWN, 4, 0).calibration) <= set(KNOWN) - {"fox"}
    assert spread(["a", "b", "c", "d"], 2) == ["b", "d"]
    assert spread(["a"], 2) == ["a"]


def test_identical_pictures_are_counted_not_averaged() -> None:
    image = torch.zeros(3, 16, 16)
    config = cachekit.FirstBlockCacheConfig()
    values = [30.0, 50.0, math.inf]
    reference = Result(Method("uncached", "", 4), [Sample(str(i), image, 1.0, {"": 4}, 4) for i in range(3)])
    cached = Result(Method("FirstBlock", "", 4, config), [Sample(str(v), image, 0.5, {"": 2}, 4, 8, v) for v in values])
    document = to_dict([reference, cached])
    assert document["methods"][1]["psnr"] == {"mean": 40.0, "worst": 30.0, "identical": 1}
    assert document["methods"][1]["speed_up"] == 2.0
    cells = [str(cell) for column in render([reference, cached]).columns for cell in column.cells]
    assert "40.0\n(30.0)\n1 equal" in cells


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "--steps"),
        (["--steps", "many"], "--steps"),
        (["--seed", "-1"], "--seed"),
        (["--seed", str(2**32)], "--seed"),
        (["--device", "tpu"], "accepted: cpu, auto, cuda"),
        (["--device", "cuda:x"], "unknown device"),
        (["--device", "cuda:99"], "not available"),
        (["--model", "emoji"], "unknown model 'emoji'"),
        (["--prompts", " , "], "--prompts is empty"),
        (["--bogus"], "--bogus"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    assert words in refused("demo", "--out", str(tmp_path / "out"), *arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_unwritable_folder_is_one_line(below: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("taken")
    assert "cannot write to" in refused("demo", "--out", str(file / below))
    assert file.read_text() == "taken"


def test_unreadable_weights_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(name: str, device: str | None = None) -> Any:
        raise OSError("no file named\ndiffusion_pytorch_model.safetensors")

    monkeypatch.setattr(zoo, "load", load)
    monkeypatch.setattr(zoo, "prompts", lambda name: list(KNOWN))
    assert "no file named diffusion_pytorch_model.safetensors" in refused("demo", "--out", str(tmp_path))


@pytest.mark.parametrize("arguments", [[], ["dmo"]])
def test_missing_or_unknown_command_is_one_line(arguments: list[str]) -> None:
    assert "command" in refused(*arguments)


def test_help_is_no_error() -> None:
    result = invoke("demo", "--help")
    assert result.exit_code == 0
    for option in ("--prompts", "--steps", "--seed", "--device", "--out", "--all"):
        assert option in result.stdout
