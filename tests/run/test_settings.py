"""What decides a picture, and what does not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cachekit.run import Job, Picture, RunError, Settings, pictures

BASE = Settings("emoji-flux", 8, guidance=3.0, arguments={"height": 16}, cache="first_block", fields={"threshold": 0.1})


def named(settings: Settings) -> str:
    return pictures(settings, ["fox"], [0])[0].name


def test_whatever_decides_a_picture_is_in_its_name() -> None:
    others = [
        replace(BASE, steps=9),
        replace(BASE, guidance=4.0),
        replace(BASE, guidance=None),
        replace(BASE, arguments={"height": 24}),
        replace(BASE, cache="taylorseer", fields={}),
        replace(BASE, fields={"threshold": 0.2}),
        replace(BASE, cache=None, fields={}),
    ]
    assert len({named(settings) for settings in [BASE, *others]}) == len(others) + 1
    assert named(BASE) == named(replace(BASE))


def test_every_prompt_with_every_seed_once() -> None:
    found = pictures(BASE, ["fox", "lion", "fox"], [3, 4, 3])
    assert [(each.prompt, each.seed) for each in found] == [("fox", 3), ("fox", 4), ("lion", 3), ("lion", 4)]
    assert len({each.name for each in found}) == 4
    assert all(each.settings["prompt"] == each.prompt and each.settings["seed"] == each.seed for each in found)


def test_a_folder_counts_by_its_files_and_not_by_its_path(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "model", tmp_path / "b" / "model"
    (first / "transformer").mkdir(parents=True)
    (first / "model_index.json").write_text("{}")
    (first / "transformer" / "weights.safetensors").write_bytes(b"1234")
    shutil.copytree(first, second)
    base = Settings(str(first), 8)
    assert named(base) == named(Settings(str(second), 8))
    (second / "transformer" / "weights.safetensors").write_bytes(b"12345")
    assert named(base) != named(Settings(str(second), 8))
    (first / "model_index.json").write_text("[]")
    assert named(base) != named(Settings(str(second), 8))


def test_settings_go_to_another_process(tmp_path: Path) -> None:
    job = Job(BASE, tuple(pictures(BASE, ["fox", "löwe"], [1])), tmp_path)
    assert Job.from_json(job.to_json()) == job


def test_settings_read_back_from_a_file_are_equal() -> None:
    picture = pictures(replace(BASE, fields={"threshold": 0.1, "pair": (1, 2)}), ["fox"], [0])[0]
    assert json.loads(json.dumps(picture.settings)) == picture.settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (replace(BASE, cache="firstblock"), "did you mean"),
        (replace(BASE, fields={"treshold": 1}), "treshold"),
        (replace(BASE, fields={"threshold": -1}), "threshold"),
        (replace(BASE, cache=None, profile="nothing.safetensors", speedup=2.0), "nothing.safetensors"),
    ],
)
def test_a_cache_that_cannot_be_made(settings: Settings, message: str) -> None:
    with pytest.raises(RunError, match=message):
        settings.config()


def test_a_pipeline_that_is_not_there() -> None:
    with pytest.raises(RunError, match="neither an embedded pipeline"):
        pictures(Settings("nothing", 8), ["fox"], [0])


@pytest.mark.parametrize("bad", [{"guidance": float("nan")}, {"arguments": {"sigmas": [float("inf")]}}])
def test_settings_that_no_file_can_hold(bad: dict[str, Any]) -> None:
    with pytest.raises(RunError, match="finite numbers"):
        pictures(replace(BASE, **bad), ["fox"], [0])


@pytest.mark.parametrize("prompt", ["赤い", "a\0b", "\ud800", '"; DROP', "fox\n\nlion", "x" * 10000])
def test_any_prompt_goes_into_a_file_and_back(prompt: str, tmp_path: Path) -> None:
    from PIL import Image

    from cachekit.run.images import encode

    picture = pictures(BASE, [prompt], [0])[0]
    job = Job(BASE, (picture,), tmp_path)
    job.keep(picture, encode(Image.new("RGB", (8, 8)), picture.settings, {}))
    assert job.is_there(picture)
    assert Job.from_json(job.to_json()) == job


def test_no_cache_is_no_config() -> None:
    assert Settings("emoji-flux", 8).config() is None


def test_a_picture_is_found_only_with_its_own_settings(tmp_path: Path) -> None:
    from PIL import Image

    from cachekit.run.images import decode, encode

    picture = pictures(BASE, ["fox"], [0])[0]
    job = Job(BASE, (picture,), tmp_path)
    image = Image.new("RGB", (8, 8), "red")
    assert not job.is_there(picture)
    path = job.keep(picture, encode(image, picture.settings, {"seconds": 1.0}))
    assert job.is_there(picture)
    assert job.missing().pictures == ()
    assert job.work() == [{"seconds": 1.0}]
    assert decode(path) == (picture.settings, {"seconds": 1.0})
    assert [file.name for file in tmp_path.iterdir()] == [picture.name], "nothing is left beside it"
    whole = path.read_bytes()
    for bad in (whole[: len(whole) // 2], whole[:-14], b"", b"no picture"):
        path.write_bytes(bad)
        assert not job.is_there(picture), "a file that was cut off is drawn again"
    other = Picture("fox", 0, {**picture.settings, "steps": 9})
    path.write_bytes(encode(image, other.settings, {}))
    assert not job.is_there(picture), "equal names alone do not count"
    image.save(path)
    assert not job.is_there(picture), "nor does a picture that says nothing"


def test_a_link_in_the_folder_is_replaced_and_not_followed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside.png", tmp_path / "out"
    folder.mkdir()
    outside.write_bytes(b"precious")
    picture = pictures(BASE, ["fox"], [0])[0]
    job = Job(BASE, (picture,), folder)
    job.path(picture).symlink_to(outside)
    job.keep(picture, b"new")
    assert outside.read_bytes() == b"precious"
    assert job.path(picture).read_bytes() == b"new"
