"""Contract 12: what the user controls forces a compute; what is computed from the latents does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cachekit as ck

from ..pipelines.tiny import TINY
from ..toys import ScriptedConfig, Stack, bare_loop, latents, of_time, pattern, prompt, reasons, toy_pipeline

ONCE = ScriptedConfig(computed=(0,))
TIMES = [torch.tensor(float(time)) for time in range(8, 0, -1)]


@torch.no_grad()
def steps_with(model: Any, arguments: Any, between: Any = None) -> list[torch.Tensor]:
    """One call a step; `arguments(step)` are its keyword arguments."""
    outputs = []
    for step, time in enumerate(TIMES):
        if between is not None:
            between(step)
        outputs.append(model(latents() + step / 8, time, **arguments(step))[0].clone())
    return outputs


CONTROL = torch.ones(1, 4, 8)
PROMPT = {"encoder_hidden_states": prompt(1)}
CHANGES: dict[str, Any] = {
    "guidance scalar": lambda step: {"guidance": 1.0 if step < 4 else 2.0, **PROMPT},
    "guidance tensor": lambda step: {"guidance": torch.tensor(1.0 if step < 4 else 2.0), **PROMPT},
    "a hint appears": lambda step: {"control": None if step < 4 else CONTROL, **PROMPT},
    "a hint appears as an argument": lambda step: PROMPT if step < 4 else {"control": CONTROL, **PROMPT},
    "a hint vanishes": lambda step: {"control": CONTROL if step < 4 else None, **PROMPT},
    "another hint": lambda step: {"control": CONTROL if step < 4 else 2 * CONTROL, **PROMPT},
    "another prompt": lambda step: {"encoder_hidden_states": prompt(1 if step < 4 else 2)},
    "a longer prompt": lambda step: {"encoder_hidden_states": prompt(1, tokens=2 if step < 4 else 5)},
}


@pytest.mark.parametrize("arguments", CHANGES.values(), ids=CHANGES)
def test_a_change_computes(arguments: Any) -> None:
    base = steps_with(Stack(4), arguments)
    model = Stack(4)
    with ck.cached(model, ONCE):
        output = steps_with(model, arguments)
        assert pattern(model) == "#...#..."
        assert "conditioning" in reasons(model)[4]
        assert ck.stats(model).last.branches == ("cond",), "the same branch, changed"
    assert all(torch.equal(a, b) for a, b in zip(base, output, strict=True)), "a hint counts exactly once"


@pytest.mark.parametrize(
    "arguments", [lambda s: {"guidance": 1.0 + (s > 3)}, lambda s: {"control": CONTROL} if s > 3 else {}]
)
def test_a_change_where_no_tensor_stays_equal(arguments: Any) -> None:
    model = Stack(4)
    with ck.cached(model, ONCE):
        steps_with(model, arguments)
        assert pattern(model) == "#...#..."
        assert ck.stats(model).last.peak_bytes == latents().nbytes, "the old result is not held beside the new one"


@pytest.mark.parametrize("inference", [False, True])
def test_conditioning_overwritten_in_place(inference: bool) -> None:
    """The same tensor object, other values."""
    with torch.inference_mode(inference):
        held = prompt(1)

        def between(step: int) -> None:
            if step == 4:
                held.copy_(prompt(2))

        model = Stack(4)
        with ck.cached(model, ONCE):
            steps_with(model, lambda step: {"encoder_hidden_states": held}, between)
            assert pattern(model) == "#...#..."


def test_an_address_that_is_used_again() -> None:
    """U11: another prompt in the memory of the freed one."""
    model = Stack(4)
    with ck.cached(model, ONCE):
        steps_with(model, lambda step: {"encoder_hidden_states": (prompt(1) if step < 4 else prompt(2)) * 1.0})
        assert pattern(model) == "#...#..."


@pytest.mark.parametrize("in_place", [False, True])
def test_tensors_computed_from_the_latents_are_no_conditioning(in_place: bool) -> None:
    """After two changes in a row such a tensor no longer stops the cache; a real change still does."""
    held = torch.zeros(1, 4, 8)

    def arguments(step: int) -> dict[str, Any]:
        control = held.fill_(step / 4) if in_place else torch.full((1, 4, 8), step / 4)
        return {"control": control, "encoder_hidden_states": prompt(1 if step < 6 else 2)}

    model = Stack(4)
    with ck.cached(model, ONCE):
        steps_with(model, arguments)
        assert pattern(model) == "###...#."


def test_a_real_controlnet_is_cached() -> None:
    """Its residuals change every step; they are in the output of a skipped step once, not twice and not never."""
    for name in ("flux-controlnet", "sd15-controlnet"):
        tiny = TINY[name]
        pipe = tiny.build()
        with ck.cached(pipe, ONCE):
            tiny.call(pipe, steps=8, guidance=False)
            assert set(pattern(pipe)[1:]) == {"."}


def test_controlnet_switched_off_half_way() -> None:
    tiny = TINY["flux-controlnet"]
    pipe = tiny.build()
    with ck.cached(pipe, ONCE):
        tiny.call(pipe, steps=8, guidance=False, control_guidance_end=0.6)
        decisions = ck.stats(pipe).last.decisions
        assert any(not d.reused for d in decisions[4:]), "the hint's end is a change"


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_weights_changed_in_place(steps: int) -> None:
    base = Stack(4)

    def double(model: Stack) -> Any:
        def between(step: int) -> None:
            if step == steps:
                model.blocks[2].weight.mul_(2)

        return between

    expected = steps_with(base, lambda step: {}, double(base))
    model = Stack(4)
    with ck.cached(model, ONCE):
        output = steps_with(model, lambda step: {}, double(model))
        assert pattern(model) == "#" + "." * (steps - 1) + "#" + "." * (7 - steps)
        assert "weights" in reasons(model)[steps]
    assert all(torch.equal(a, b) for a, b in zip(expected, output, strict=True))


def test_weights_changed_before_a_computed_step() -> None:
    """Noticed at the next reuse, which would mix results from before and after the change."""
    model = Stack(4)

    def between(step: int) -> None:
        if step == 3:
            model.blocks[2].weight.mul_(2)

    with ck.cached(model, ck.TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=2)):
        steps_with(model, lambda step: {}, between)
        assert pattern(model) == "##.###.#"
        assert "weights" in reasons(model)[4]


@torch.no_grad()
def test_weights_changed_while_samples_decide() -> None:
    """One sample's decision finds the change; no other sample of the batch reuses after that."""
    model = Stack(4)
    with ck.cached(model, ck.FirstBlockCacheConfig(threshold=10.0, per_sample=True)):
        for step, time in enumerate(TIMES):
            if step == 4:
                model.blocks[2].weight.mul_(2)
            model(torch.cat([latents(), 2 * latents()]) + step / 8, time)
        assert pattern(model) == "#...#..."
        assert [item.reused_samples for item in ck.stats(model).last.decisions[3:5]] == [(True, True), (False, False)]


@pytest.mark.parametrize("how", ["load_state_dict", "assign", "new parameter", "new block"])
def test_weights_replaced(how: str) -> None:
    model = Stack(4)

    def between(step: int) -> None:
        if step != 4:
            return
        state = {name: value * 2 for name, value in model.state_dict().items()}
        if how == "load_state_dict":
            model.load_state_dict(state)
        elif how == "assign":
            model.load_state_dict(state, assign=True)
        elif how == "new parameter":
            model.blocks[2].weight = torch.nn.Parameter(torch.tensor(3.0), requires_grad=False)
        else:
            model.blocks[2].extra = torch.nn.Linear(2, 2)

    with ck.cached(model, ONCE):
        steps_with(model, lambda step: {}, between)
        assert pattern(model) == "#...#..."


@pytest.mark.filterwarnings("ignore::cachekit.CacheWarning")
def test_everything_computes_while_gradients_are_enabled() -> None:
    model = Stack(4)
    for block in model.blocks:
        block.weight.requires_grad_(True)
    with ck.cached(model, ONCE):
        for time in TIMES:
            output = model(latents(), time)[0]
            output.sum().backward()
        assert pattern(model) == "#" * 8
        assert "grad" in reasons(model)[3]
        assert all(block.weight.grad is not None for block in model.blocks)


def lora_config() -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"], init_lora_weights="gaussian")


def with_lora(model: Any) -> None:
    model.add_adapter(lora_config(), adapter_name="style")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.requires_grad_(False)


LORA: dict[str, Any] = {
    "load": lambda model: with_lora(model),
    "scale": lambda model: model.set_adapters(["style"], [0.25]),
    "disable": lambda model: model.disable_adapters(),
    "unload": lambda model: model.delete_adapters("style"),
    "fuse": lambda model: model.fuse_lora(),
}


@pytest.mark.parametrize("action", LORA)
def test_lora(action: str) -> None:
    tiny = TINY["flux"]
    pipe = tiny.build()
    model = pipe.transformer
    if action != "load":
        with_lora(model)
    with ck.cached(pipe, ONCE):

        def callback(_: Any, index: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
            if index == 3:
                LORA[action](model)
            return values

        tiny.call(pipe, steps=8, guidance=False, callback=callback)
        assert pattern(pipe) == "#...#..."
        assert "weights" in reasons(pipe)[4]


def test_lora_scale_of_the_call() -> None:
    """`joint_attention_kwargs={"scale": ...}` scales and unscales inside the denoiser: skips go on, runs differ."""
    tiny = TINY["flux"]
    pipe = tiny.build()
    with_lora(pipe.transformer)
    with ck.cached(pipe, ONCE):
        outputs = []
        for scale in (0.0, 1.0):
            outputs.append(tiny.call(pipe, steps=6, guidance=False, joint_attention_kwargs={"scale": scale}))
            assert pattern(pipe) == "#....."
        assert not torch.equal(*outputs)


def test_a_mid_run_change_in_a_pipeline_equals_the_uncached_one_at_the_next_step() -> None:
    pipe = toy_pipeline(change=of_time(torch.cos))
    with ck.cached(pipe, ONCE):
        pipe(8, conditions=lambda index: [{"guidance": 3.5 if index < 5 else 1.0}])
        assert pattern(pipe) == "#....#.."
        bare_loop(pipe.transformer, 3)
