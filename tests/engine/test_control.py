"""What is watched beside the denoiser: control networks, adapters, switches. A change arrives in its very step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

import cachekit as ck
from cachekit.engine.discovery import find_control_networks, is_denoiser

from ..conformance.cases import cases
from ..pipelines.families import unet
from ..pipelines.tiny import TINY
from ..toys import ScriptedConfig, Stack, ToyPipeline, counted_syncs, latents, pattern, prompt, reasons
from . import controlled
from .controlled import PICTURE, call

ONCE = ScriptedConfig(computed=(0,))
Callback = Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]


# a toy: hints from a network beside the denoiser, in a loop that calls it as it likes


class ToyControl(nn.Module):
    """Hints that change with the latents: `scale * (hidden_states + controlnet_cond)`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()), requires_grad=False)
        self.calls = 0

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        controlnet_cond: Tensor | None = None,
        conditioning_scale: float = 1.0,
        encoder_hidden_states: Tensor | None = None,
    ) -> tuple[Tensor]:
        self.calls += 1
        hint = self.weight * hidden_states * 0.5
        for more in (controlnet_cond, encoder_hidden_states):
            hint = hint if more is None else hint + more.mean()
        return (conditioning_scale * hint,)


class Guided(ToyPipeline):
    """A toy pipeline whose `controlnet` is called before the denoiser, once a step or once a branch."""

    _optional_components: ClassVar[list[str]] = ["transformer_2", "controlnet"]

    def __init__(
        self,
        transformer: nn.Module,
        scheduler: Any,
        controlnet: nn.Module | None = None,
        transformer_2: nn.Module | None = None,
    ) -> None:
        super().__init__(transformer, scheduler, transformer_2)
        self.register_modules(controlnet=controlnet)
        self.control: Callable[[int], dict[str, Any] | None] = lambda step: {}
        self.per_branch, self.remade, self.step = False, False, 0

    def _denoise(self, model: nn.Module, x: Tensor, t: Tensor, style: str, call: dict[str, Any], name: Any) -> Tensor:
        given = self.control(self.step)
        if given is not None and self.controlnet is not None and (self.per_branch or self.first):
            text = {"encoder_hidden_states": call.get("encoder_hidden_states")} if self.per_branch else {}
            self.hint = self.controlnet(x, t, **given, **text)[0]
        elif given is None:
            self.hint = None
        hint = self.hint * 1.0 if self.remade and self.hint is not None else self.hint
        self.first = False
        return super()._denoise(model, x, t, style, {**call, "control": hint}, name)

    def run(self, steps: int = 8, **options: Any) -> Tensor:
        self.step, self.first, self.hint = 0, True, None
        user = options.pop("callback", None)

        def callback(pipe: Any, index: int) -> None:
            self.step, self.first = index + 1, True
            if user is not None:
                user(pipe, index)

        return self(steps, callback=callback, **options)


def guided(scheduler: Any = None) -> Guided:
    return Guided(Stack(4), scheduler or FlowMatchEulerDiscreteScheduler(), ToyControl())


IMAGE = torch.ones(1, 4, 8)
CHANGES: dict[str, Callable[[int], dict[str, Any] | None]] = {
    "image": lambda step: {"controlnet_cond": IMAGE if step < 4 else 2 * IMAGE},
    "scale": lambda step: {"controlnet_cond": IMAGE, "conditioning_scale": 1.0 if step < 4 else 0.5},
    "scale to zero": lambda step: {"controlnet_cond": IMAGE, "conditioning_scale": 1.0 if step < 4 else 0.0},
    "vanishes": lambda step: {"controlnet_cond": IMAGE} if step < 4 else None,
    "appears": lambda step: None if step < 4 else {"controlnet_cond": IMAGE},
    "another size": lambda step: {"controlnet_cond": IMAGE if step < 4 else torch.ones(1, 4, 4)},
}
CONDITIONS = [{"encoder_hidden_states": prompt(1)}, {"encoder_hidden_states": prompt(2)}]


@pytest.mark.parametrize("remade", [False, True], ids=["as returned", "remade"])
@pytest.mark.parametrize("calls", ["one call", "two calls", "per branch"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_computes_in_that_very_step(change: Callable[..., Any], calls: str, remade: bool) -> None:
    pipe = guided()
    pipe.control, pipe.per_branch, pipe.remade = change, calls == "per branch", remade
    conditions = CONDITIONS[: 1 if calls == "one call" else 2]
    with ck.cached(pipe, ONCE):
        for _ in range(2):
            pipe.run(conditions=conditions)
            for branch in ck.stats(pipe).last.branches:
                computed = pattern(pipe, branch)
                assert computed[4] == "#", computed
                # A hint that was copied is learnt to depend on the latents from its changes: two more steps.
                assert computed[:4] == ("###." if remade and change(0) is not None else "#...")
                assert computed[7] == "."
        assert len(ck.stats(pipe).last.branches) == len(conditions)


def test_without_a_change_the_first_step_is_the_only_one_and_nothing_is_read_back() -> None:
    pipe = guided()
    pipe.control = lambda step: {"controlnet_cond": IMAGE}
    with ck.cached(pipe, ONCE), counted_syncs() as syncs:
        pipe.run(conditions=CONDITIONS)
        assert pattern(pipe, "cond") == pattern(pipe, "uncond") == "#......."
        read = len(syncs)
        pipe.run(conditions=CONDITIONS)
        assert ck.stats(pipe).host_syncs == 0
        assert len(syncs) - read <= 1, "the schedule is copied once a run"


def test_an_image_made_anew_in_every_step_is_compared_by_value() -> None:
    pipe = guided()
    pipe.control = lambda step: {"controlnet_cond": IMAGE * 1.0}
    with ck.cached(pipe, ONCE):
        for _ in range(2):
            pipe.run()
            assert pattern(pipe) == "#......."
        assert ck.stats(pipe).host_syncs == 7


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_an_image_overwritten_in_place(inference: bool) -> None:
    with torch.inference_mode(inference):
        held = IMAGE.clone()
        pipe = guided()
        pipe.control = lambda step: {"controlnet_cond": held}

        def callback(_: Any, index: int) -> None:
            if index == 3:
                held.mul_(3)

        with ck.cached(pipe, ONCE):
            pipe.run(callback=callback)
            assert pattern(pipe) == "#...#..."
            assert "controlnet_cond" in reasons(pipe)[4]


def test_weights_of_the_control_network() -> None:
    pipe = guided()
    pipe.control = lambda step: {"controlnet_cond": IMAGE}

    def callback(pipe: Any, index: int) -> None:
        if index == 3:
            with torch.no_grad():
                pipe.controlnet.weight.mul_(2)

    with ck.cached(pipe, ONCE):
        pipe.run(callback=callback)
        assert pattern(pipe) == "#...#..."
        assert "weights" in reasons(pipe)[4]


def test_a_schedule_that_changes_the_scale_in_every_step_computes_in_every_step() -> None:
    pipe = guided()
    pipe.control = lambda step: {"controlnet_cond": IMAGE, "conditioning_scale": step / 8}
    with ck.cached(pipe, ONCE):
        pipe.run()
        assert pattern(pipe) == "########"


def test_on_for_a_while_and_off_again() -> None:
    pipe = guided()
    pipe.control = lambda step: {"controlnet_cond": IMAGE} if 2 <= step < 5 else None
    with ck.cached(pipe, ONCE):
        pipe.run()
        assert pattern(pipe) == "#.#..#.."


def test_a_scheduler_without_a_step_index() -> None:
    pipe = guided(DDIMScheduler())
    pipe.control = lambda step: {"controlnet_cond": IMAGE if step < 4 else 2 * IMAGE}
    with ck.cached(pipe, ONCE):
        pipe.run(style="raw")
        assert pattern(pipe) == "#...#..."


def test_a_network_replaced_between_runs() -> None:
    pipe = guided()
    pipe.control = lambda step: {"controlnet_cond": IMAGE if step < 4 else 2 * IMAGE}
    with ck.cached(pipe, ONCE):
        pipe.run()
        pipe.register_modules(controlnet=ToyControl())
        pipe.run()
        assert pattern(pipe) == "#...#..."
        pipe.register_modules(controlnet=None)
        pipe.control = lambda step: None
        pipe.run()
        assert pattern(pipe) == "#......."


def test_enabled_on_the_denoiser_alone_the_pipeline_is_found_at_the_first_call() -> None:
    """The control network's first call came before; from the second run on it is seen too."""
    pipe = guided()
    pipe.control = lambda step: {"controlnet_cond": IMAGE if step < 4 else 2 * IMAGE}
    with ck.cached(pipe.transformer, ONCE):
        pipe.run()
        assert pattern(pipe.transformer)[4] == "#"
        pipe.run()
        assert pattern(pipe.transformer) == "#...#..."


def test_enabled_half_way() -> None:
    pipe = guided()
    pipe.control = lambda step: {"controlnet_cond": IMAGE if step < 5 else 2 * IMAGE}

    def callback(pipe: Any, index: int) -> None:
        if index == 1:
            ck.enable_cache(pipe, "taylorseer", cache_interval=20, disable_cache_before_step=0)

    pipe.run(callback=callback)
    assert pattern(pipe) == "#..#.."
    ck.disable_cache(pipe)


def test_two_pipelines_share_a_control_network() -> None:
    """Each follows its own runs, also when they take turns."""
    first = guided()
    second = Guided(Stack(4), DDIMScheduler(), first.controlnet)
    first.control = lambda step: {"controlnet_cond": IMAGE if step < 4 else 2 * IMAGE}
    second.control = lambda step: {"controlnet_cond": IMAGE if step < 2 else 3 * IMAGE}

    def turn(_: Any, index: int) -> None:
        if index == 2:
            second.run(style="raw")

    with ck.cached(first, ONCE), ck.cached(second, ONCE):
        first.run(callback=turn)
        assert pattern(first) == "#...#..."
        assert pattern(second) == "#.#....."


def hooked(module: nn.Module) -> bool:
    return any("_compiled_call_impl" in part.__dict__ for part in module.modules())


def test_hooks_go_with_the_cache() -> None:
    pipe = guided()
    with ck.cached(pipe, ONCE):
        assert hooked(pipe.controlnet)
    assert not hooked(pipe.controlnet)
    base = guided().run()
    assert torch.equal(pipe.run(), base)


def test_nothing_is_held_alive() -> None:
    """Neither by a forgotten cache, nor by the control network, nor after a run."""
    pipe = guided()
    held = [torch.ones(1, 4, 8)]
    pipe.control = lambda step: {"controlnet_cond": held[0]}
    ck.enable_cache(pipe, ONCE)
    pipe.run()
    reference = weakref.ref(held.pop())
    gc.collect()
    assert reference() is None, "the control image is held after the last step"
    net, model = pipe.controlnet, weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert model() is None, "a shared control network keeps the denoiser alive"
    assert not hooked(net)


def test_free_lets_go_of_the_image_of_an_unfinished_run() -> None:
    pipe = guided()
    held: list[Any] = [torch.ones(1, 4, 8)]
    pipe.control = lambda step: {"controlnet_cond": held[0]}

    def stop(_: Any, index: int) -> None:
        if index == 3:
            raise KeyboardInterrupt

    with ck.cached(pipe, ONCE):
        with pytest.raises(KeyboardInterrupt):
            pipe.run(callback=stop)
        ck.free(pipe)
        pipe.hint = None
        reference = weakref.ref(held.pop())
        gc.collect()
        assert reference() is None


def test_a_loop_of_the_users_own_around_the_components() -> None:
    """No pipeline is running, but the scheduler that advances is the one that the cache was enabled with."""
    pipe = guided()
    x = latents()
    with ck.cached(pipe, ONCE), torch.no_grad():
        pipe.scheduler.set_timesteps(8)
        for step, t in enumerate(pipe.scheduler.timesteps):
            hint = pipe.controlnet(x, t.expand(1), IMAGE if step < 4 else 2 * IMAGE)[0]
            noise = pipe.transformer(x, t.expand(1), encoder_hidden_states=prompt(1), control=hint)[0]
            x = pipe.scheduler.step(noise, t, x).prev_sample
        assert pattern(pipe) == "#...#..."


def test_a_loop_that_does_not_step_holds_few_calls() -> None:
    pipe = guided()
    with ck.cached(pipe, ONCE), torch.no_grad():
        pipe.scheduler.set_timesteps(8)
        images = [torch.full((1, 4, 8), float(i)) for i in range(200)]
        references = [weakref.ref(image) for image in images]
        while images:
            pipe.controlnet(latents(), pipe.scheduler.timesteps[0], images.pop())
        gc.collect()
        assert sum(reference() is not None for reference in references) <= 64


# which components are watched


def test_what_is_a_control_network() -> None:
    pipe = controlled.sd_control(2)
    assert find_control_networks(pipe) == [pipe.controlnet]
    assert find_control_networks(TINY["sd15"].build()) == []
    assert find_control_networks(controlled.sd_adapter()) == []


def test_a_unet_with_its_control_network_inside_is_a_denoiser() -> None:
    """ControlNet-XS: the hints come in as arguments of the denoiser."""
    model = next(case for case in cases() if case.name == "unet-controlnet-xs").build()
    assert is_denoiser(model)
    assert not is_denoiser(controlled.control_net())


# real pipelines


def at(index: int, act: Callable[[Any, dict[str, Any]], Any]) -> Callback:
    """A callback that acts once, after step `index`."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        if step == index:
            act(pipe, values)
        return values

    return callback


def doubled(pipe: Any, values: dict[str, Any]) -> None:
    for name in ("image", "control_image"):
        if name in values:
            values[name] = 2 * values[name]


SD: dict[str, Any] = {"image": PICTURE}
SD3: dict[str, Any] = {"control_image": PICTURE, "max_sequence_length": 16}
RUNS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "nothing changes": (controlled.sd_control, SD, "#......."),
    "batched guidance": (controlled.sd_control, {**SD, "guidance_scale": 5.0}, "#......."),
    "end": (controlled.sd_control, {**SD, "control_guidance_end": 0.6}, "#...#..."),
    "start": (controlled.sd_control, {**SD, "control_guidance_start": 0.25}, "#.#....."),
    "one of two ends": (
        lambda: controlled.sd_control(2),
        {"image": [PICTURE, PICTURE], "control_guidance_end": [1.0, 0.6]},
        "#...#...",
    ),
    "another image": (
        controlled.sd_control,
        {**SD, "callback_on_step_end": at(3, doubled), "callback_on_step_end_tensor_inputs": ["latents", "image"]},
        "#...#...",
    ),
    "image overwritten": (
        controlled.sd_control,
        {
            **SD,
            "callback_on_step_end": at(3, lambda pipe, values: values["image"].mul_(2)),
            "callback_on_step_end_tensor_inputs": ["latents", "image"],
        },
        "#...#...",
    ),
    "sd3": (controlled.sd3_control, SD3, "#......."),
    "sd3 end": (controlled.sd3_control, {**SD3, "control_guidance_end": 0.6}, "#...#..."),
    "adapter": (controlled.sd_adapter, SD, "#......."),
}


@pytest.mark.parametrize(("build", "options", "expected"), RUNS.values(), ids=RUNS)
def test_real_control(build: Callable[[], Any], options: dict[str, Any], expected: str) -> None:
    pipe = build()
    base = call(pipe, **options)
    with ck.cached(pipe, ONCE):
        first = call(pipe, **options)
        assert pattern(pipe) == expected
        assert torch.equal(call(pipe, **options), first)
        assert torch.isfinite(first).all()
        assert not torch.equal(first, base)
    with ck.cached(pipe, ck.FirstBlockCacheConfig(0.0)), pytest.warns(ck.CacheWarning, match="nothing was reused"):
        assert torch.equal(call(pipe, **options), base)
    assert torch.equal(call(pipe, **options), base)


def test_guess_mode_pads_the_hints_and_is_still_cached() -> None:
    """The hints that reach the denoiser are not those that the control-net returned; they are learnt to be dynamic."""
    pipe = controlled.sd_control()
    with ck.cached(pipe, ONCE):
        call(pipe, **SD, guidance_scale=5.0, guess_mode=True)
        assert pattern(pipe) == "###....."
        call(pipe, **SD, guidance_scale=5.0, guess_mode=True, control_guidance_end=0.6)
        assert pattern(pipe)[4] == "#"


@pytest.mark.parametrize("sampler", ["pndm", "heun"])
def test_samplers_that_call_more_often(sampler: str) -> None:
    pipe = controlled.sd_control(sampler=sampler)
    with ck.cached(pipe, ONCE):
        call(pipe, **SD)
        assert pattern(pipe) == "#" + "." * (len(pipe.scheduler.timesteps) - 1)


def test_a_computed_step_takes_the_hint_exactly_once() -> None:
    """What the denoiser returns in the step of the change is what it returns uncached for the same latents."""
    pipe = controlled.sd_control()
    calls: list[tuple[dict[str, Any], Tensor]] = []

    def keep(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        calls.append(({"sample": args[0], "timestep": args[1], **kwargs}, output[0].clone()))

    hook = pipe.unet.register_forward_hook(keep, with_kwargs=True)
    with ck.cached(pipe, ONCE):
        call(pipe, **SD, control_guidance_end=0.6)
        assert pattern(pipe) == "#...#..."
    hook.remove()
    for step, (kwargs, output) in enumerate(calls):
        with torch.no_grad():
            again = pipe.unet(**kwargs)[0]
        assert torch.equal(again, output) == (step in (0, 4))


# image prompts, guided attention, hints inside the denoiser


def test_the_scale_of_an_image_prompt() -> None:
    pipe = controlled.sd_image_prompt()
    image = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"ip_adapter_image_embeds": [image], "guidance_scale": 5.0}
    with ck.cached(pipe, ONCE):
        call(pipe, **options)
        assert pattern(pipe) == "#......."
        assert ck.stats(pipe).host_syncs == 0
        changed = at(3, lambda pipe, values: pipe.set_ip_adapter_scale(0.2))
        call(pipe, **options, callback_on_step_end=changed)
        assert pattern(pipe) == "#...#..."
        assert "adapter" in reasons(pipe)[4]


@pytest.mark.parametrize(
    "act",
    [
        lambda pipe: pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4),
        lambda pipe: pipe.unet.set_default_attn_processor(),
        lambda pipe: pipe.unet.fuse_qkv_projections(),
    ],
    ids=["freeu", "processors", "fused projections"],
)
def test_switches_inside_the_denoiser(act: Callable[[Any], Any]) -> None:
    pipe = unet.scheduler(TINY["sd15"].build(), "ddim")
    with ck.cached(pipe, ONCE):
        TINY["sd15"].call(pipe, steps=8, callback=at(3, lambda pipe, values: act(pipe)))
        assert pattern(pipe) == "#...#..."


def test_freeu_is_part_of_a_computed_result() -> None:
    """FreeU scales the deep part's features in place."""
    pipe = unet.scheduler(TINY["sd15"].build(), "ddim")
    plain = TINY["sd15"].call(pipe, steps=6)
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    base = TINY["sd15"].call(pipe, steps=6)
    assert not torch.equal(plain, base)
    with ck.cached(pipe, "deepcache", cache_interval=1):
        assert torch.equal(TINY["sd15"].call(pipe, steps=6), base)
    with ck.cached(pipe, "deepcache"):
        output = TINY["sd15"].call(pipe, steps=6)
        assert pattern(pipe) == "#..#.."
        assert torch.equal(TINY["sd15"].call(pipe, steps=6), output)
    assert torch.equal(TINY["sd15"].call(pipe, steps=6), base)


@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_perturbed_attention_guidance(guidance: float) -> None:
    """The perturbed call is a further part of the batch; its effect stays in the skipped steps."""
    pipe = controlled.sd_perturbed()
    results = {}
    for scale in (0.0, 3.0):
        base = call(pipe, pag_scale=scale, guidance_scale=guidance)
        with ck.cached(pipe, "deepcache", cache_interval=2):
            results[scale] = base, call(pipe, pag_scale=scale, guidance_scale=guidance)
            assert pattern(pipe) == "#.#.#.#."
        assert torch.equal(call(pipe, pag_scale=scale, guidance_scale=guidance), base)
    effect, kept = (results[3.0][i] - results[0.0][i] for i in (0, 1))
    assert torch.cosine_similarity(effect.flatten(), kept.flatten(), dim=0) > 0.9


def test_skip_layer_guidance_is_a_branch_of_its_own() -> None:
    pipe = TINY["sd3"].build()
    options: dict[str, Any] = {
        "skip_guidance_layers": [1, 2],
        "skip_layer_guidance_start": 0.2,
        "skip_layer_guidance_stop": 0.7,
        "guidance_scale": 5.0,
        "max_sequence_length": 16,
    }
    base = call(pipe, **options)
    with ck.cached(pipe, ONCE):
        first = call(pipe, **options)
        main, other = ck.stats(pipe).last.branches
        assert pattern(pipe, main) == "#......."
        assert pattern(pipe, other) == "#..."
        assert torch.equal(call(pipe, **options), first)
    assert torch.equal(call(pipe, **options), base)


@pytest.mark.parametrize("change", [None, "control_hidden_states", "control_hidden_states_scale"])
def test_hints_inside_the_denoiser(change: str | None) -> None:
    """VACE: the control video and its scale are arguments; the stack that reads them is skipped with the others."""
    pipe = controlled.wan_vace()
    seen: list[int] = []

    def alter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        seen.append(1)
        return args, {**kwargs, change: 2 * kwargs[change]} if change and len(seen) > 8 else kwargs

    # Between the pipeline and the cache stands nothing, so the change is made where the pipeline calls.
    model = pipe.transformer
    options: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 5, "guidance_scale": 4.0}
    text = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(0))
    options |= {"prompt": None, "prompt_embeds": text, "negative_prompt_embeds": -text}
    with ck.cached(pipe, ONCE):
        inner = model.__dict__["_compiled_call_impl"]
        model.__dict__["_compiled_call_impl"] = lambda *args, **kwargs: inner(*args, **alter(model, args, kwargs)[1])
        call(pipe, **options)
        for branch in ("cond", "uncond"):
            assert pattern(pipe, branch) == ("#...#..." if change else "#.......")
        model.__dict__["_compiled_call_impl"] = inner


# a second attempt


def test_another_attempt_finds_the_hints_that_the_first_one_took_out() -> None:
    """UNets take T2I-Adapter's hints out of the list that they are given."""

    class Taking(Stack):
        wider = False

        def forward(self, hidden_states: Tensor, timestep: Any, hints: list[Tensor] | None = None) -> tuple[Tensor]:
            x = hidden_states * 1.0
            for block in self.blocks:
                x = block(x, torch.as_tensor(timestep))
                if hints:
                    x = x + hints.pop(0)
            if self.wider:
                x = self.blocks[0](x, torch.as_tensor(timestep))
            return (x,)

    outputs = []
    for cached in (False, True):
        model = Taking(3)
        with ck.cached(model, ScriptedConfig(computed=(0,))) if cached else nullcontext(), torch.no_grad():
            for step in range(2):
                model.wider = step == 1
                output = model(latents() + step, torch.tensor(8.0 - step), [torch.ones(1, 4, 8)] * 3)[0]
            if cached:
                assert "other blocks" in reasons(model)[1]
        outputs.append(output)
    assert torch.equal(*outputs)
