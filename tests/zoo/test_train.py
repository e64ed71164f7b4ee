"""The trainer's parts: schedules, parallel gradients, data, resume and packing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline

from cachekit.zoo import glyphs
from cachekit.zoo.pipelines import assemble
from cachekit.zoo.train import decoder, flow, text, vae
from cachekit.zoo.train.budget import Budget, learning_rate
from cachekit.zoo.train.pack import pack
from cachekit.zoo.train.parallel import Microbatches


def toy_data() -> flow.Dataset:
    torch.manual_seed(0)
    return flow.Dataset(torch.randn(40, 2, 64, 40), torch.randn(41, 10, 128), torch.randn(41, 64))


def test_a_budget_ends_by_steps_or_by_the_clock() -> None:
    assert [Budget(4, None).progress(step) for step in (0, 2, 4, 9)] == [0.0, 0.5, 1.0, 1.0]
    assert Budget(None, 1.0, spent=30.0).progress(0) == pytest.approx(0.5, abs=0.05)
    assert Budget(None, 1.0, spent=61.0).progress(0) == 1.0
    with pytest.raises(ValueError, match="steps or of minutes"):
        Budget(None, None)


def test_the_learning_rate_rises_stays_and_falls_to_one_percent() -> None:
    assert learning_rate(1.0, 0, 0.0, warmup=10) == pytest.approx(0.1)
    assert learning_rate(1.0, 100, 0.5, warmup=10) == pytest.approx(1.0)
    assert learning_rate(1.0, 100, 0.75, warmup=10) == pytest.approx(0.505)
    assert learning_rate(1.0, 100, 1.0, warmup=10) == pytest.approx(0.01)


def test_microbatches_add_up_to_the_gradient_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    data = torch.randn(8, 3)

    def loss(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = model(part).square().mean()
        return value, value.detach()

    figure = Microbatches(model, workers=2).backward(loss, [(part,) for part in data.chunk(4)])
    parallel = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    whole, _ = loss(data)
    whole.backward()
    assert figure.item() == pytest.approx(whole.item(), rel=1e-5)
    for ours, parameter in zip(parallel, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad)


def test_batches_show_every_glyph_before_any_again_and_drop_some_prompts() -> None:
    data = toy_data()
    batches = data.batches(20)
    seen: list[int] = []
    empty = 0
    for _ in range(40):
        clean, noise, times, words, _pooled = next(batches)
        assert clean.shape == noise.shape == (20, 64, 40)
        assert ((times > 0) & (times < 1)).all()
        same = (clean[:, None, None] == data.latents[None]).flatten(3).all(-1).any(-1)
        seen += same.int().argmax(1).tolist()
        empty += int((words == data.words[-1]).flatten(1).all(1).sum())
    assert sorted(seen[:40]) == list(range(40))
    assert 40 < empty < 130


@pytest.mark.slow
def test_training_stops_at_its_steps_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    data = toy_data()
    flow.train_flow(data, tmp_path, steps=1, minutes=None, seed=0, workers=1)
    first = flow.averaged(tmp_path)
    flow.train_flow(data, tmp_path, steps=3, minutes=None, seed=0, workers=1)
    stored = torch.load(tmp_path / "flow.pt", weights_only=True)
    assert stored["step"] == 3
    assert {state["step"].item() for state in stored["optimizer"]["state"].values()} == {3.0}
    assert not torch.equal(first.x_embedder.weight, flow.averaged(tmp_path).x_embedder.weight)


def test_known_words_are_one_token_and_all_prompts_look_different() -> None:
    prompts = [*glyphs.prompts(), ""]
    encoders = text.build(prompts, seed=0)
    assert len(encoders.t5_tokenizer("red apple").input_ids) == 3
    assert len(encoders.clip_tokenizer("red apple").input_ids) == 4
    assert max(len(encoders.t5_tokenizer(prompt).input_ids) for prompt in prompts) <= text.T5_LENGTH
    for states in encoders(prompts):
        centred = (states - states.mean(0)).flatten(1)
        cosine = torch.nn.functional.cosine_similarity(centred[:, None], centred[None], dim=-1).fill_diagonal_(0)
        assert cosine.max() < 0.98


@pytest.mark.slow
def test_a_packed_pipeline_loads_and_draws(tmp_path: Path) -> None:
    encoders = text.build(["red heart", ""], seed=0)
    autoencoder = vae.new_vae()
    autoencoder.register_to_config(shift_factor=0.1, scaling_factor=0.5)
    pack(tmp_path, autoencoder, encoders, flow.new_transformer(0))
    pipe = assemble(tmp_path)
    pipe.set_progress_bar_config(disable=True)
    assert type(pipe) is FluxPipeline
    assert pipe("red heart", num_inference_steps=1).images[0].size == (64, 64)
    torch.testing.assert_close(
        pipe.text_encoder(torch.tensor([[1, 2]])).pooler_output, encoders.clip(torch.tensor([[1, 2]])).pooler_output
    )


def test_whitening_spreads_inputs_evenly_over_the_outputs() -> None:
    torch.manual_seed(0)
    states = torch.randn(500, 8) * torch.tensor([10.0, 5, 3, 1, 1, 1, 0.5, 0.5]) + 4.0
    linear = torch.nn.Linear(8, 24)
    flow.whiten(linear, states, floor=0.0)
    out = linear(states)
    torch.testing.assert_close(out.mean(0), torch.zeros(24), atol=1e-4, rtol=0)
    spread = torch.linalg.svdvals(out.detach())[:8]
    assert spread.max() / spread.min() == pytest.approx(1.0, abs=0.01)


def test_colour_targets_tell_red_from_green_and_ignore_brightness() -> None:
    red, green, grey = torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 8, 8), torch.full((1, 3, 8, 8), 0.3)
    red[:, 0], green[:, 1] = 1.0, 1.0
    assert vae.colours(red).shape == (1, 2, 2, 2)
    assert (vae.colours(red)[:, 0] > 1).all()
    assert (vae.colours(green)[:, 0] < -1).all()
    torch.testing.assert_close(vae.colours(grey), torch.zeros(1, 2, 2, 2))


def test_the_first_stage_trains_and_sets_unit_statistics(tmp_path: Path) -> None:
    pictures = torch.randint(0, 256, (4, 4, 3, 64, 64), dtype=torch.uint8)
    trained = vae.train_vae(pictures, tmp_path, steps=1, minutes=None, seed=0, workers=1)
    latents = vae.encode(trained, pictures)
    assert latents.shape == (4, 4, 10, 16, 16)
    scaled = (latents - trained.config.shift_factor) * trained.config.scaling_factor
    assert scaled.mean().item() == pytest.approx(0.0, abs=1e-3)
    assert scaled.std().item() == pytest.approx(1.0, abs=1e-3)
    before = trained.decoder.conv_in.weight.clone()
    encoder = {name: value.clone() for name, value in trained.encoder.state_dict().items()}
    decoder.refine_decoder(trained, pictures, latents, tmp_path, steps=1, minutes=None, seed=0, workers=1)
    assert not torch.equal(before, trained.decoder.conv_in.weight)
    assert all(torch.equal(value, encoder[name]) for name, value in trained.encoder.state_dict().items())
    again = decoder.load_refined(vae.new_vae(), tmp_path)
    assert torch.equal(again.decoder.conv_in.weight, trained.decoder.conv_in.weight)
