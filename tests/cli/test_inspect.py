"""`cachekit inspect` on classes, folders and embedded pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from diffusers import FluxTransformer2DModel
from torch import nn

import cachekit
from cachekit.inspection import inspect_denoiser
from tests.pipelines.families import flux

from .support import invoke, refused


def inspected(target: str) -> list[dict[str, Any]]:
    result = invoke("inspect", target, "--json")
    assert result.exit_code == 0, result.output
    document: list[dict[str, Any]] = json.loads(result.stdout)
    return document


def test_class_by_name() -> None:
    (found,) = inspected("FluxTransformer2DModel")
    assert found["model"] == "FluxTransformer2DModel"
    assert [(stack["name"], stack["classes"]) for stack in found["stacks"]] == [
        ("transformer_blocks", {"FluxTransformerBlock": 19}),
        ("single_transformer_blocks", {"FluxSingleTransformerBlock": 38}),
    ]
    assert (found["latents"], found["timesteps"]) == (["hidden_states"], ["timestep"])
    assert found["attention"] == 57
    assert found["unet"] is None
    assert found["parameters"] > 10**10
    names = [entry["name"] for entry in found["strategies"]]
    assert {"first_block", "magcache", "taylorseer", "taylorseer (attention)"} <= set(names)
    refused = {entry["name"]: entry["reason"] for entry in found["strategies"] if not entry["site"]}
    assert set(refused) <= {"pab (temporal)", "pab (cross)", "deepcache"}
    assert all("it has spatial" in refused[name] for name in refused if name != "deepcache")
    assert "is no UNet" in refused["deepcache"]


def test_unet_by_name() -> None:
    (found,) = inspected("UNet2DConditionModel")
    assert found["unet"] == {"down_blocks": 4, "mid_block": 1, "up_blocks": 4}
    assert found["latents"] == ["sample"]


def test_text_for_people() -> None:
    result = invoke("inspect", "FluxTransformer2DModel")
    assert result.exit_code == 0
    for words in ("19 x FluxTransformerBlock", "57 modules", "first_block", "hidden_states", "11.89 B"):
        assert words in result.stdout


def test_embedded_pipeline() -> None:
    (found,) = inspected("emoji-flux")
    assert (found["name"], found["model"]) == ("transformer", "FluxTransformer2DModel")


def test_folders_of_a_pipeline_and_of_a_model(tmp_path: Path) -> None:
    flux.family()[0].build().transformer.save_config(tmp_path / "transformer")
    index = {
        "_class_name": "FluxPipeline",
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "image_encoder": [None, None],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (of_pipeline,) = inspected(str(tmp_path))
    (of_model,) = inspected(str(tmp_path / "transformer"))
    assert (of_pipeline["name"], of_model["name"]) == ("transformer", "")
    assert of_pipeline["stacks"] == of_model["stacks"]
    assert [stack["blocks"] for stack in of_model["stacks"]] == [4, 4]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("FluxTransformer2Model", "did you mean FluxTransformer2DModel"),
        ("emoji_flux", "did you mean emoji-flux"),
        ("fluxtransformer2dmodel", "FluxTransformer2DModel"),
        ("qqqq", "no zoo pipeline, folder or denoiser class"),
        ("AutoencoderKL", "takes no timestep"),
        ("FluxPipeline", "is a pipeline class"),
        ("LatteTransformer3DModel", "cannot be built from its default configuration"),
        ("FlowMatchEulerDiscreteScheduler", "no zoo pipeline, folder or denoiser class"),
    ],
)
def test_what_cannot_be_inspected_is_one_line(target: str, words: str) -> None:
    assert words in refused("inspect", target)


def test_bad_folders_are_one_line(tmp_path: Path) -> None:
    assert "neither model_index.json nor config.json" in refused("inspect", str(tmp_path))
    index = tmp_path / "model_index.json"
    index.write_text("{")
    assert "not valid JSON" in refused("inspect", str(tmp_path))
    index.write_text("[]")
    assert "no JSON object" in refused("inspect", str(tmp_path))
    index.write_text(json.dumps({"text_encoder": ["transformers", "CLIPTextModel"]}))
    assert "holds no denoiser" in refused("inspect", str(tmp_path))
    index.write_text(json.dumps({"transformer": ["diffusers", "FluxTransformer2DModel"]}))
    assert "cannot be built" in refused("inspect", str(tmp_path))


class Flat(nn.Module):
    """A denoiser with nothing to skip."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, hidden_states: Any, timestep: Any) -> Any:
        return self.layer(hidden_states)


def test_reasons_stand_where_nothing_attaches() -> None:
    found = inspect_denoiser(Flat())
    assert (found.stacks, found.attention) == ((), 0)
    reasons = {entry.name: entry.reason for entry in found.strategies if not entry.attaches}
    without = {"schedule", "fastercache"}
    assert {entry.name for entry in found.strategies} - reasons.keys() == without, "they need nothing inside"
    assert "no list of at least two blocks" in reasons["first_block"]


def test_a_model_is_left_as_it_was() -> None:
    model: FluxTransformer2DModel = flux.family()[0].build().transformer
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    inspect_denoiser(model)
    assert not cachekit.is_cache_enabled(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert all(module._compiled_call_impl is None for module in model.modules())
