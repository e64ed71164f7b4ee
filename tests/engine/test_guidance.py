"""Site: a guidance branch predicted from the other one, in two calls and in one call on a doubled batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.cache_utils import CacheMixin
from torch import Tensor, nn

import cachekit as ck
from cachekit.engine.halves import Half, halves_of, joined, parts_of, ways
from cachekit.engine.planes import Planes, planes_of

from ..pipelines.tiny import TINY
from ..toys import Stack, ToyPipeline, bare_loop, counted_syncs, latents, prompt, toy_pipeline

pytestmark = pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
PAIR = [{"encoder_hidden_states": prompt(seed)} for seed in (1, 2)]
EVERYWHERE = (-1, 1001)


def faster(skip: int = 4, **fields: Any) -> ck.FasterCacheConfig:
    """Guidance at every noise level, with weights of one: exact where the branches differ by a constant."""
    return ck.FasterCacheConfig(
        unconditional_batch_skip_range=skip,
        unconditional_batch_timestep_skip_range=EVERYWHERE,
        **{"alpha_low_frequency": 1.0, "alpha_high_frequency": 1.0, **fields},
    )


def guidance(target: Any, branch: str) -> str:
    run = ck.stats(target).last
    assert run is not None
    return "".join("." if item.reused else "#" for item in run.of(branch) if item.part == "guidance")


class Doubled(Stack):
    """Refuses what does not fit together; position ids must stay whole."""

    def forward(
        self, hidden_states: Tensor, timestep: Any, encoder_hidden_states: Tensor, ids: Tensor
    ) -> tuple[Tensor]:  # type: ignore[override]
        if len(ids) != hidden_states.shape[1] or len(encoder_hidden_states) != len(hidden_states):
            raise ValueError("shapes")
        return super().forward(hidden_states * (1 + ids[:, :1] / 8), timestep, encoder_hidden_states)


def doubled(tokens: int = 4, batch: int = 1, swapped: bool = False, same: bool = True) -> tuple[Tensor, dict[str, Any]]:
    x = latents(batch, tokens)
    order = PAIR[::-1] if swapped else PAIR
    texts = [item["encoder_hidden_states"].expand(batch, -1, -1) for item in order]
    halves = [x, x if same else x + 1]
    return torch.cat(halves), {"encoder_hidden_states": torch.cat(texts), "ids": torch.ones(tokens, 3)}


# two calls


def test_the_second_call_does_not_run_the_model() -> None:
    pipe = toy_pipeline()
    with ck.cached(pipe, faster(4)) as handle:
        output = pipe(conditions=PAIR)
        assert guidance(pipe, "uncond") == "#...#..."
        assert guidance(pipe, "cond") == "########"
        assert pipe.transformer.calls == [10] * 4
        assert handle.stats().host_syncs == 0
    assert torch.equal(output, toy_pipeline()(conditions=PAIR))


def test_outside_the_window_both_are_computed() -> None:
    pipe = toy_pipeline()
    with ck.cached(pipe, ck.FasterCacheConfig(unconditional_batch_timestep_skip_range=(-1, 500))):
        pipe(conditions=PAIR)
    levels = pipe.scheduler.timesteps
    with ck.cached(pipe, ck.FasterCacheConfig(unconditional_batch_timestep_skip_range=(-1, 500))):
        pipe(conditions=PAIR)
        assert guidance(pipe, "uncond") == "".join("." if level < 500 else "#" for level in levels.tolist())


@pytest.mark.parametrize("names", [("cond", "uncond"), ("uncond", "cond"), ("pred_uncond", "pred_cond"), ()])
def test_the_branch_called_second_is_predicted_whatever_it_is(names: tuple[str, ...]) -> None:
    class Named(Stack, CacheMixin):
        pass

    pipe = ToyPipeline(Named(), toy_pipeline().scheduler)
    with ck.cached(pipe, faster(4)):
        pipe(conditions=PAIR, names=names)
        first, second = names or ("cond", "uncond")
        assert guidance(pipe, first) == "########"
        assert guidance(pipe, second) == "#...#..."


def test_one_branch_or_calls_on_other_latents_are_no_pair() -> None:
    pipe = toy_pipeline()
    with ck.cached(pipe, faster()) as handle:
        pipe()
        assert handle.stats().reused == 0
    model = Stack()
    with ck.cached(model, faster(), branches=("cond", "uncond")), torch.no_grad():
        for step in range(4):
            for index in range(2):
                model(latents(seed=index), torch.tensor(900.0 - 100 * step), **PAIR[index])
        assert ck.stats(model).reused == 0


@pytest.mark.parametrize("which", [0, 1])
def test_a_prompt_overwritten_in_place_makes_both_branches_compute(which: int) -> None:
    texts = [prompt(1), prompt(2)]
    conditions = [{"encoder_hidden_states": text} for text in texts]

    def change(step: int) -> None:
        if step == 2:
            texts[which].add_(1)

    model = Stack()
    times = [torch.tensor(900.0 - 100 * step) for step in range(6)]
    with ck.cached(model, faster(6)):
        outputs = bare_loop(model, times=times, conditions=conditions, at_step=change)
        assert guidance(model, "uncond") == "#.#..."
    texts[which].sub_(1)
    expected = bare_loop(Stack(), times=times, conditions=conditions, at_step=change)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_guidance_that_stops_and_returns() -> None:
    pipe = toy_pipeline()
    with ck.cached(pipe, faster(3)):
        pipe(steps=9, conditions=lambda step: PAIR if step < 3 or step > 6 else PAIR[:1])
        assert guidance(pipe, "uncond") == "#..#."
        assert ck.stats(pipe).bytes_held == 0


def test_an_aborted_run_and_another_size_leave_nothing() -> None:
    pipe = toy_pipeline()

    def abort(pipeline: ToyPipeline, step: int) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with ck.cached(pipe, faster()):
        first = pipe(conditions=PAIR)
        with pytest.raises(KeyboardInterrupt):
            pipe(conditions=PAIR, callback=abort)
        pipe(conditions=PAIR, x=latents(tokens=7))
        assert torch.equal(pipe(conditions=PAIR), first)
        assert guidance(pipe, "uncond") == "#...#..."


def test_weights_that_change_make_both_branches_compute() -> None:
    pipe = toy_pipeline()

    def change(pipeline: ToyPipeline, step: int) -> None:
        if step == 1:
            pipeline.transformer.blocks[0].weight.mul_(2)

    with ck.cached(pipe, faster(8)):
        pipe(conditions=PAIR, callback=change)
        assert guidance(pipe, "uncond") == "#.#....."


def test_what_is_held_is_one_output_and_one_difference() -> None:
    pipe = toy_pipeline()
    held: list[int] = []
    with ck.cached(pipe, faster()):
        pipe(conditions=PAIR, callback=lambda pipeline, step: held.append(ck.stats(pipeline).bytes_held))
    size = latents().nbytes
    assert held == [2 * size] * 7 + [0]


def test_the_answer_is_never_what_is_kept() -> None:
    model = Stack()
    with ck.cached(model, faster(9)), torch.no_grad():
        for step in range(5):
            for condition in PAIR:
                output = model(latents(), torch.tensor(900.0 - step), **condition)[0]
                expected = latents() + condition["encoder_hidden_states"].mean(1, keepdim=True) + 2
                assert torch.equal(output, expected)
                output.zero_()


def test_low_precision_keeps_its_dtype() -> None:
    model = Stack().to(torch.bfloat16)
    conditions = [{"encoder_hidden_states": prompt(seed).bfloat16()} for seed in (1, 2)]
    with ck.cached(model, faster(4)):
        outputs = bare_loop(model, x=latents(dtype=torch.bfloat16), conditions=conditions)
    assert {output.dtype for output in outputs} == {torch.bfloat16}


# one call on a doubled batch


@pytest.mark.parametrize("tokens", [2, 3, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_half_of_the_batch_is_run(tokens: int, batch: int) -> None:
    """Also where position ids (two tokens) or text look like a batch of two."""
    x, call = doubled(tokens, batch)
    model, seen = Doubled(), []
    with ck.cached(model, faster(4), branches=("uncond", "cond")):
        model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
        outputs = bare_loop(model, x=x, conditions=[call])
    rows = 2 * batch
    whole = [seen[0], *[count for count in seen[1:] if count == rows]]
    assert len(whole) == 2
    assert seen[-3:] == [batch] * 3
    expected = bare_loop(Doubled(), x=x, conditions=[call])
    for output, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, wanted)


@pytest.mark.parametrize("names", [("uncond", "cond"), ("cond", "uncond")])
def test_the_conditional_half_is_the_one_that_runs(names: tuple[str, str]) -> None:
    x, call = doubled(swapped=names[0] == "cond")  # PAIR[1] is the conditional one
    model, seen = Doubled(), []
    with ck.cached(model, faster(8), branches=names):
        model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["encoder_hidden_states"]), with_kwargs=True
        )
        bare_loop(model, x=x, conditions=[call])
    assert torch.equal(seen[-1], PAIR[1]["encoder_hidden_states"])


def test_a_batch_of_two_is_not_taken_for_guidance() -> None:
    x, call = doubled()
    for model, x_, branches in (
        (Doubled(), x, None),  # nobody says that it is guidance
        (Doubled(), doubled(same=False)[0], ("uncond", "cond")),  # other latents
    ):
        with ck.cached(model, faster(), branches=branches) as handle:
            bare_loop(model, x=x_, conditions=[call])
            assert handle.stats().reused == 0
    x = latents(1).expand(4, -1, -1)  # four branches, or one picture twice
    call["encoder_hidden_states"] = prompt(batch=4)
    model = Doubled()
    with ck.cached(model, faster(), branches=("uncond", "cond")) as handle:
        bare_loop(model, x=x, conditions=[call])
        assert handle.stats().reused == 0


def test_two_calls_with_two_equal_pictures_stay_two_calls() -> None:
    conditions = [{"encoder_hidden_states": prompt(seed, batch=2)} for seed in (1, 2)]
    model = Stack()
    with ck.cached(model, faster(4), branches=("cond", "uncond")):
        outputs = bare_loop(model, x=latents(1).repeat(2, 1, 1), conditions=conditions)
    expected = bare_loop(Stack(), x=latents(1).repeat(2, 1, 1), conditions=conditions)
    for output, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, wanted)


class Mixing(Stack):
    """Samples of a batch see each other."""

    def forward(self, hidden_states: Tensor, timestep: Any, encoder_hidden_states: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        (output,) = super().forward(hidden_states, timestep, encoder_hidden_states)
        return (output + output.mean(0),)


def test_a_model_that_mixes_samples_is_left_alone_and_that_is_said() -> None:
    x, call = doubled()
    model = Mixing()
    call.pop("ids")
    with ck.cached(model, faster(), branches=("uncond", "cond")) as handle:
        with pytest.warns(ck.CacheWarning, match="cannot be left out"):
            outputs = bare_loop(model, x=x, conditions=[call])
        assert handle.stats().reused == 0
    assert all(torch.equal(a, b) for a, b in zip(outputs, bare_loop(Mixing(), x=x, conditions=[call]), strict=True))


@pytest.mark.parametrize("name", ["sd3", "z-image", "ltx"])
def test_pipelines_tell_the_order_and_two_runs_are_equal(name: str) -> None:
    tiny = TINY[name]
    pipe = tiny.build()
    with ck.cached(pipe, faster(4, spatial_attention_block_skip_range=None)) as handle:
        first = tiny.call(pipe, steps=8)
        notes = [note for note in handle.stats().last.notes if "half of the batch" in note]
        assert torch.equal(tiny.call(pipe, steps=8), first)
        assert handle.stats().reused == 6
        assert not notes


def test_half_a_batch_costs_one_read() -> None:
    tiny = TINY["sd3"]
    pipe = tiny.build()
    with ck.cached(pipe, faster(4, spatial_attention_block_skip_range=None)) as handle:
        tiny.call(pipe, steps=8)
        tiny.call(pipe, steps=8)
        reused = [item.syncs for item in handle.stats().last.decisions if item.reused]
        assert max(reused) <= 1


# parts


def test_ways_put_the_likely_one_first() -> None:
    arguments = {
        "x": torch.zeros(2, 4, 3),
        "text": [torch.zeros(5), torch.zeros(6)],
        "rotary": (torch.zeros(4, 2),) * 2,
    }
    _, guesses = ways(arguments, 2, ("x",))
    half = next(guesses()).take(Half(1), arguments)
    assert half["x"].shape == (1, 4, 3)
    assert [len(text) for text in half["text"]] == [6]
    assert [tuple(part.shape) for part in half["rotary"]] == [(4, 2)] * 2
    assert len(list(guesses())) <= 12


def test_frames_beside_the_batch_and_batches_in_second_place_are_among_the_ways() -> None:
    arguments = {"x": torch.zeros(2, 4), "frames": torch.zeros(6, 4), "layers": torch.zeros(8, 2, 3)}
    _, guesses = ways(arguments, 2, ("x",))
    shapes = {
        (tuple(taken["frames"].shape), tuple(taken["layers"].shape))
        for taken in (guess.take(Half(0), arguments) for guess in guesses())
    }
    assert ((3, 4), (8, 1, 3)) in shapes


@pytest.mark.parametrize("index", [0, 1])
def test_joined_is_the_opposite_of_halves(index: int) -> None:
    whole = {"a": torch.arange(8.0).reshape(4, 2), "b": [torch.full((2,), float(i)) for i in range(4)], "c": 3}
    halves = halves_of(whole, 4, listed=True)
    computed = Half(index)
    output = {"a": computed.take(whole["a"]), "b": computed.of_list(whole["b"]), "c": 3}
    predicted = {path: pair[computed.other.index] for path, pair in halves.items()}
    again = joined(output, predicted, computed, listed=True)
    assert again["c"] == 3
    assert all(torch.equal(value, parts_of(whole)[path]) for path, value in parts_of(again).items())


IDS = torch.cartesian_prod(torch.zeros(1), torch.arange(3.0), torch.arange(5.0))


@pytest.mark.parametrize(
    ("arguments", "size", "grid"),
    [
        ({"img_ids": IDS}, None, (3, 5)),
        ({"img_ids": IDS[None]}, None, (3, 5)),
        ({"num_frames": 1, "height": 3, "width": 5}, None, (1, 3, 5)),
        ({"img_shapes": [[(1, 5, 3)]]}, None, (1, 5, 3)),
        ({}, (300, 500), (3, 5)),
        ({}, (500, 300), (5, 3)),
        ({}, (512, 512), (15,)),
        ({"txt_ids": torch.zeros(15, 3)}, None, (15,)),
    ],
)
def test_tokens_are_laid_out(arguments: dict[str, Any], size: Any, grid: tuple[int, ...]) -> None:
    tokens = torch.randn(2, 15, 4)
    planes = planes_of(tokens, arguments, size, float)
    assert planes.grid == grid
    assert planes.is_flat == (len(grid) == 1)
    seen = planes.see(tokens)
    assert seen.shape[-2:] == (grid[-2:] if len(grid) > 1 else (1, 15))
    assert torch.equal(planes.back(seen), tokens)
    row, column = divmod(7, grid[-1])
    assert torch.equal(seen.flatten(2)[..., row * grid[-1] + column], tokens[:, 7])


@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (1, 4, 3, 5, 7)])
def test_pictures_and_videos_end_in_height_and_width(shape: tuple[int, ...]) -> None:
    assert planes_of(torch.zeros(shape), {}, None, float) == Planes()


def test_what_reads_nothing() -> None:
    with counted_syncs() as seen:
        planes_of(torch.zeros(2, 15, 4), {}, (300, 500), float)
    assert not seen


def test_modules_without_a_second_branch_hold_one_output() -> None:
    model: nn.Module = Stack()
    with ck.cached(model, faster()) as handle:
        bare_loop(model)
        assert handle.stats().bytes_held == latents().nbytes
        assert "no second branch" in str(handle.stats())
