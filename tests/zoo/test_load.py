"""The embedded pipeline is a plain FluxPipeline that works with no arguments but a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from transformers import CLIPTextModel, T5EncoderModel

from cachekit import zoo
from cachekit.zoo.pipelines import ZOO

LIMIT = 20_000_000


@pytest.fixture(scope="module")
def pipe() -> FluxPipeline:
    loaded = zoo.load("emoji-flux")
    loaded.set_progress_bar_config(disable=True)
    return loaded


def draw(pipe: FluxPipeline, prompt: str, seed: int, **options: object) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    image = pipe(prompt, generator=generator, output_type="pt", **options).images[0]
    assert isinstance(image, torch.Tensor)
    return image


def test_it_is_exactly_a_flux_pipeline_of_the_usual_parts(pipe: FluxPipeline) -> None:
    assert type(pipe) is FluxPipeline
    assert type(pipe.transformer) is FluxTransformer2DModel
    assert type(pipe.vae) is AutoencoderKL
    assert type(pipe.scheduler) is FlowMatchEulerDiscreteScheduler
    assert type(pipe.text_encoder) is CLIPTextModel
    assert type(pipe.text_encoder_2) is T5EncoderModel
    assert len(pipe.transformer.transformer_blocks) == 2
    assert len(pipe.transformer.single_transformer_blocks) == 6


def test_weights_are_float32_by_default_and_what_was_asked_for_else(pipe: FluxPipeline) -> None:
    half = zoo.load("emoji-flux", dtype=torch.bfloat16)
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        assert {weight.dtype for weight in getattr(pipe, name).parameters()} == {torch.float32}
        assert {weight.dtype for weight in getattr(half, name).parameters()} == {torch.bfloat16}


def test_one_call_with_only_a_prompt_draws_64_pixels_in_28_steps(pipe: FluxPipeline) -> None:
    seen: list[tuple[torch.Size, torch.Size]] = []

    def note(module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, torch.Tensor]) -> None:
        seen.append((kwargs["hidden_states"].shape, kwargs["encoder_hidden_states"].shape))

    hook = pipe.transformer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        image = pipe("red heart").images[0]
    finally:
        hook.remove()
    assert image.size == (64, 64)
    assert len(seen) == 28
    assert set(seen) == {(torch.Size([1, 64, 40]), torch.Size([1, 10, 128]))}


def test_equal_seeds_draw_equal_pictures_and_other_seeds_others(pipe: FluxPipeline) -> None:
    first = draw(pipe, "red apple", seed=1, num_inference_steps=4)
    assert torch.equal(first, draw(pipe, "red apple", seed=1, num_inference_steps=4))
    assert not torch.equal(first, draw(pipe, "red apple", seed=2, num_inference_steps=4))
    assert not torch.equal(first, draw(pipe, "green apple", seed=1, num_inference_steps=4))


@pytest.mark.parametrize("prompt", ["", "   ", "zebra on a ☃ at Zürich", "Ω" * 300, "red heart " * 50])
def test_any_prompt_is_accepted(pipe: FluxPipeline, prompt: str) -> None:
    image = draw(pipe, prompt, seed=0, num_inference_steps=2)
    assert image.shape == (3, 64, 64)
    assert torch.isfinite(image).all()


def test_the_case_of_a_prompt_does_not_matter(pipe: FluxPipeline) -> None:
    lower = draw(pipe, "red heart", seed=0, num_inference_steps=2)
    assert torch.equal(lower, draw(pipe, "Red HEART", seed=0, num_inference_steps=2))


def test_guidance_changes_the_picture(pipe: FluxPipeline) -> None:
    plain = draw(pipe, "red heart", seed=0, num_inference_steps=4)
    guided = draw(pipe, "red heart", seed=0, num_inference_steps=4, negative_prompt="", true_cfg_scale=3.0)
    assert not torch.equal(plain, guided)


def test_a_saved_pipeline_loads_again_and_draws_the_same(pipe: FluxPipeline, tmp_path: Path) -> None:
    pipe.save_pretrained(tmp_path)
    again = FluxPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": 2, "height": 64, "width": 64}
    assert torch.equal(draw(pipe, "rose", 0, **options), draw(again, "rose", 0, **options))


def test_an_unknown_name_is_refused_with_the_names_that_exist() -> None:
    for function in (zoo.load, zoo.prompts):
        with pytest.raises(ValueError, match=r"'flux-emoji'.*emoji-flux"):
            function("flux-emoji")


def test_what_ships_is_small_and_is_data() -> None:
    files = [path for entry in ZOO.values() for path in entry.folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= LIMIT
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".md", ".txt", ".png"}
