"""The trainer's parts: schedules, parallel gradients, data, resume and packing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline

from cachekit.zoo import glyphs
from cachekit.zoo.pipelines import assemble
from cachekit.zoo.train import flow, text, vae
from cachekit.zoo.train.budget import Budget, learning_rate
from cachekit.zoo.train.pack import pack
from cachekit.zoo.train.parallel import Microbatches


@pytest.fixture(autouse=True)
def threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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
    pack(tmp_path, vae.new_vae(), encoders, flow.new_transformer(0))
    pipe = assemble(tmp_path)
    pipe.set_progress_bar_config(disable=True)
    assert type(pipe) is FluxPipeline
    assert pipe("red heart", num_inference_steps=1).images[0].size == (64, 64)
    torch.testing.assert_close(
        pipe.text_encoder(torch.tensor([[1, 2]])).pooler_output, encoders.clip(torch.tensor([[1, 2]])).pooler_output
    )
