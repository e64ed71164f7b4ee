"""D5: settings of a run, and the user's configuration."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest
from pydantic import BaseModel

import offload
from offload.devices import LARGEST_SEED, RunSettings, config_path, load_config, set_config, unset_config


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration file of this test, in a folder that is not there yet."""
    path = tmp_path / "user" / "config.json"
    monkeypatch.setenv("CACHEKIT_CONFIG", str(path))
    return path


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({}, {}),
        ({"device": "CUDA:1", "seed": 0}, {"device": "cuda:1", "seed": 0}),
        ({"device": "mps:0"}, {"device": "mps"}),
        ({"device": "auto"}, {"device": "auto"}),
        ({"device": ""}, {}),
        ({"device": None}, {}),
        ({"seed": None}, {"seed": None}),
        ({"seed": LARGEST_SEED}, {"seed": 4294967295}),
    ],
)
def test_d5_only_what_is_set_is_written(given: dict[str, Any], written: dict[str, Any]) -> None:
    settings = RunSettings(**given)
    assert settings.stored() == written
    assert bool(settings) == bool(written)
    assert json.loads(settings.model_dump_json()) == written
    again = RunSettings.read(settings.stored())
    assert again.stored() == written


def test_d5_inside_another_document() -> None:
    class Document(BaseModel):
        name: str
        settings: RunSettings = RunSettings()

    assert Document(name="a", settings={"seed": 3}).model_dump() == {"name": "a", "settings": {"seed": 3}}
    with pytest.raises(pydantic.ValidationError, match="did you mean 'device'"):
        Document(name="a", settings={"devise": "cpu"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"devcie": "cpu"}, "unknown key 'devcie'; did you mean 'device'? The keys are device, seed"),
        ({"Seed": 1}, "unknown key 'Seed'; did you mean 'seed'?"),
        ({"steps": 28}, "unknown key 'steps'; The keys are device, seed"),
        ({3: 28}, "unknown key '3'"),
        ({"device": "gpu"}, "device: unknown device 'gpu'; accepted: cpu, auto, cuda, cuda:N, mps, mps:N"),
        ({"device": 1}, "device: unknown device '1'"),
        ({"seed": -1}, "seed is a whole number from 0 to 4294967295, or null for none; got -1"),
        ({"seed": 2**32}, "seed is a whole number"),
        ({"seed": "7"}, "seed is a whole number"),
        ({"seed": 7.0}, "seed is a whole number"),
        ({"seed": True}, "seed is a whole number"),
        (["device"], "valid dictionary"),
    ],
)
def test_d5_what_is_refused(given: Any, message: str) -> None:
    with pytest.raises(offload.SettingsError) as caught:
        RunSettings.read(given, "recipe.yaml")
    assert str(caught.value).startswith("recipe.yaml: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"RunSettings"):
        RunSettings.model_validate(given)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunSettings(seed=1).seed = 2  # type: ignore[misc]


def test_the_users_file_lies_where_the_platform_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CACHEKIT_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert config_path() == tmp_path / "cachekit" / "config.json"
    assert config_path().parts[-2:] == ("cachekit", "config.json")


def test_the_users_configuration_is_changed_key_by_key(path: Path) -> None:
    assert load_config() == RunSettings()
    set_config("device", "AUTO")
    set_config("seed", 7)
    assert json.loads(path.read_text(encoding="utf-8")) == {"device": "auto", "seed": 7}
    assert load_config() == RunSettings(device="auto", seed=7)
    set_config("device", "")
    assert json.loads(path.read_text(encoding="utf-8")) == {"seed": 7}
    assert not unset_config("seed")
    assert not path.exists()
    assert not unset_config("device")


@pytest.mark.parametrize(("key", "value"), [("device", "gpu"), ("seed", "x"), ("devise", "cpu")])
def test_a_bad_value_changes_nothing(path: Path, key: str, value: str) -> None:
    set_config("device", "cpu")
    before = path.read_bytes()
    with pytest.raises(offload.SettingsError):
        set_config(key, value)
    assert path.read_bytes() == before
    assert [item.name for item in path.parent.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no settings"),
        ('{"device": "gpu"}', "unknown device 'gpu'"),
        ('{"devise": "cpu"}', "did you mean 'device'"),
        ("\xff", "is not JSON|cannot read"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_kept(path: Path, text: str, message: str) -> None:
    path.parent.mkdir()
    path.write_text(text, encoding="latin-1")
    for action in (load_config, lambda: set_config("seed", 1), lambda: unset_config("seed")):
        with pytest.raises(offload.SettingsError, match=message) as caught:
            action()
        assert str(path) in str(caught.value)
    assert path.read_text(encoding="latin-1") == text


def test_a_link_to_the_file_stays_one(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir()
    path.symlink_to(tmp_path / "dotfiles" / "cachekit.json")
    set_config("seed", 5)
    assert path.is_symlink()
    assert (tmp_path / "dotfiles" / "cachekit.json").is_file()


def test_a_folder_that_cannot_be_written(path: Path) -> None:
    path.parent.write_text("in the way", encoding="utf-8")
    with pytest.raises(offload.SettingsError, match=r"cannot (read|write) .*config\.json"):
        set_config("seed", 5)
