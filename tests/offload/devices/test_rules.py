"""D1 to D3: which names are accepted, what decides, and what stands in for a device that is not there."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.devices import RunSettings, decide_device, resolve_device, set_config
from tests.offload.devices.machines import INTEL, MAC, NONE, ONE, ROCM, THREE, Machine

BOTH = Machine(cards=("RTX 4090",), mps=True, xpu=True)


@pytest.fixture(autouse=True)
def own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration file of this test; there is none at first."""
    path = tmp_path / "user" / "config.json"
    monkeypatch.setenv("CACHEKIT_CONFIG", str(path))
    return path


@pytest.mark.parametrize(
    ("asked", "machine", "expected"),
    [
        ("cpu", THREE, "cpu"),
        (" CPU ", NONE, "cpu"),
        ("cuda", ONE, "cuda"),
        ("CUDA:1", THREE, "cuda:1"),
        ("cuda:02", THREE, "cuda:2"),
        (torch.device("cuda", 1), THREE, "cuda:1"),
        (torch.device("cpu"), THREE, "cpu"),
        ("cuda:0", ROCM, "cuda:0"),
        ("mps", MAC, "mps"),
        ("Mps:3", MAC, "mps"),
        (torch.device("mps", 0), MAC, "mps"),
        ("auto", NONE, "cpu"),
        ("AUTO", ONE, "cuda"),
        ("auto", THREE, "cuda"),
        ("auto", ROCM, "cuda"),
        ("auto", MAC, "mps"),
        ("auto", BOTH, "cuda"),
        ("", THREE, "cpu"),
        ("  ", MAC, "cpu"),
        (None, THREE, "cpu"),
    ],
)
def test_d1_accepted_names(asked: Any, machine: Machine, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.pretend(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_device(asked) == torch.device(expected)


@pytest.mark.parametrize(
    "asked", ["gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:1.0", "cuda:1,cuda:0", "cpu:0", "meta", "mps:a", "rocm", "mlx"]
)
def test_d1_anything_else_is_refused_with_the_list(asked: str) -> None:
    with pytest.raises(offload.DeviceError, match=r"accepted: cpu, auto, cuda, cuda:N, mps, mps:N$") as caught:
        resolve_device(asked)
    assert repr(asked) in str(caught.value)


@pytest.mark.parametrize("asked", [0, True, 1.5, b"cpu", ["cpu"]])
def test_d1_other_types_are_refused(asked: Any) -> None:
    with pytest.raises(offload.DeviceError, match="accepted: cpu"):
        resolve_device(asked)


PLACES = {"vae": "cpu", "transformer": "cuda:2", "text_encoder": "auto", "image_encoder": ""}
SET = {"device": "cuda:1"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"component": "vae", "placement": PLACES, "requested": "cuda:0", "settings": SET, "config": SET},
            "cpu (placement)",
        ),
        ({"component": "transformer", "placement": PLACES, "requested": "cpu"}, "cuda:2 (placement)"),
        ({"component": "text_encoder", "placement": PLACES, "requested": "cuda:0"}, "cuda:0 (argument)"),
        ({"component": "text_encoder", "placement": PLACES, "settings": SET}, "cuda:1 (recipe)"),
        ({"component": "text_encoder", "placement": PLACES}, "cpu (default)"),
        ({"component": "image_encoder", "placement": PLACES, "settings": SET}, "cuda:1 (recipe)"),
        ({"component": "scheduler", "placement": PLACES, "requested": "cuda"}, "cuda (argument)"),
        ({"placement": PLACES, "requested": "cuda"}, "cuda (argument)"),
        ({"requested": "cpu", "settings": SET, "config": SET}, "cpu (argument)"),
        ({"requested": "", "settings": SET, "config": {"device": "cuda:2"}}, "cuda:1 (recipe)"),
        ({"settings": RunSettings(device="cuda:1"), "config": {"device": "cuda:2"}}, "cuda:1 (recipe)"),
        ({"settings": {"seed": 3}, "config": {"device": "cuda:2"}}, "cuda:2 (user configuration)"),
        ({"settings": {"device": ""}, "config": {"device": "auto"}}, "cuda (user configuration)"),
        ({"settings": {}, "config": {}}, "cpu (default)"),
        ({}, "cpu (default)"),
    ],
)
def test_d2_the_first_that_says_something_decides(
    given: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    THREE.pretend(monkeypatch)
    found = decide_device(**given)
    assert str(found) == expected
    assert found.device == resolve_device(**given)


def test_d2_the_users_file_is_asked_before_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    THREE.pretend(monkeypatch)
    set_config("device", "cuda:2")
    assert str(decide_device()) == "cuda:2 (user configuration)"
    assert str(decide_device(config={})) == "cpu (default)"
    assert str(decide_device("auto")) == "cuda (argument)"


def test_d2_a_file_that_is_not_asked_is_not_read(own_configuration: Path) -> None:
    own_configuration.parent.mkdir()
    own_configuration.write_text("{", encoding="utf-8")
    assert str(decide_device("cpu")) == "cpu (argument)"
    with pytest.raises(offload.SettingsError, match="is not JSON"):
        decide_device()


def test_d2_a_placement_with_a_bad_name_is_refused_whatever_is_placed() -> None:
    with pytest.raises(offload.DeviceError, match="placement of vae: unknown device 'gpu'"):
        decide_device(component="transformer", placement={"transformer": "cpu", "vae": "gpu"})


@pytest.mark.parametrize(
    ("asked", "machine", "expected", "message"),
    [
        ("cuda", NONE, "cpu", "torch sees no CUDA device"),
        ("cuda:1", MAC, "cpu", "torch sees no CUDA device"),
        ("cuda:1", ONE, "cuda", "torch sees one CUDA device, so the current one"),
        ("cuda:3", THREE, "cuda", "torch sees 3 CUDA devices, so the current one"),
        (torch.device("cuda", 9), ROCM, "cuda", "cuda:9 is not there"),
        ("mps", THREE, "cpu", "torch sees no Apple GPU"),
        ("mps:1", NONE, "cpu", "torch sees no Apple GPU"),
        ("xpu", INTEL, "cpu", "Intel XPU cannot be selected"),
        ("xpu:0", NONE, "cpu", "Intel XPU cannot be selected"),
        ("auto", INTEL, "cpu", "Intel XPU cannot be selected"),
    ],
)
def test_d3_what_is_missing_falls_back_with_a_warning(
    asked: Any, machine: Machine, expected: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.pretend(monkeypatch)
    with pytest.warns(offload.OffloadWarning, match=message) as caught:
        assert resolve_device(asked) == torch.device(expected)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    found = decide_device(asked)
    assert message in found.note
    assert str(found).startswith(f"{expected} (argument): ")


@pytest.mark.parametrize("source", ["placement", "settings", "config"])
def test_d3_holds_wherever_the_name_stands(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    NONE.pretend(monkeypatch)
    placed = {"component": "vae", "placement": {"vae": "cuda:1"}}
    given: dict[str, Any] = placed if source == "placement" else {source: {"device": "cuda:1"}}
    with pytest.warns(offload.OffloadWarning, match="cuda:1 is not available here"):
        assert resolve_device(**given) == torch.device("cpu")


def test_on_this_machine() -> None:
    """No substitution: the device that is chosen can be used."""
    device = resolve_device("auto")
    assert torch.ones(2, device=device).sum().item() == 2
    assert resolve_device() == torch.device("cpu")
