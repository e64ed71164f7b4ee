"""TextKV: exact, on whatever in a model does not depend on the step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import diffusers
import numpy
import pytest
import torch
from torch import Tensor, nn

import cachekit as ck
from cachekit.strategies import find_strategy, to_config

from ..conformance.cases import cases
from ..conformance.cases import run as moving_loop
from ..pipelines.tiny import TINY
from ..text_toys import TEXT, WIDTH, CrossStack, counted_linears, noise, text
from ..toys import bare_loop, pattern, reasons

CASES = {case.name: case for case in cases()}
STEPS = 6
KEYS = "blocks.0.attn.to_k"


def loop(model: nn.Module, prompts: Any = None, steps: int = STEPS, at_step: Any = None, **more: Any) -> list[Tensor]:
    """A sampling loop; `prompts` are the embeddings of each branch, or a function of the step that gives them."""
    prompts = [text()] if prompts is None else prompts
    step = iter(range(steps))
    arguments: list[dict[str, Any]] = [{} for _ in (prompts(0) if callable(prompts) else prompts)]

    def before(index: int) -> None:
        if at_step is not None:
            at_step(next(step))
        for given, prompt in zip(arguments, prompts(index) if callable(prompts) else prompts, strict=True):
            given.update(encoder_hidden_states=prompt, **more)

    return bare_loop(model, steps, noise(), conditions=arguments, at_step=before)


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def hooked(model: nn.Module) -> set[str]:
    """Paths of the modules with a hook of ours, without the root."""
    return {path for path, module in model.named_modules() if path and "_compiled_call_impl" in module.__dict__}


def test_the_text_is_projected_twice_in_the_first_run_and_once_in_later_ones() -> None:
    model, prompts = CrossStack(), [text(1), text(2)]
    base = loop(model, prompts)
    with counted_linears(model) as counts, ck.cached(model, "text_kv"):
        assert same(loop(model, prompts), base)
        # The second branch takes the same way through the model, so that it needs no second look.
        assert pattern(model, "cond") == "##...."
        assert pattern(model, "uncond") == "#....."
        assert {path for path in counts if counts[path] == 3} == {
            "caption.linear_1",
            "caption.linear_2",
            *(f"blocks.{i}.attn.{name}" for i in range(3) for name in ("to_k", "to_v")),
        }
        assert counts["blocks.0.attn.to_q"] == counts["blocks.0.attn.to_out"] == 2 * STEPS
        counts.clear()
        assert same(loop(model, prompts), base)
        assert counts[KEYS] == 2
    assert not hooked(model)
    assert same(loop(model, prompts), base)


def test_what_is_saved_and_held_is_counted() -> None:
    model, tokens = CrossStack(3), 5
    with ck.cached(model, "text_kv") as handle:
        loop(model)
        loop(model)
        run = ck.stats(model).last
        assert run is not None
        caption = 2 * tokens * (TEXT * WIDTH + WIDTH * WIDTH)
        keys_and_values = 3 * 2 * (2 * tokens * WIDTH * WIDTH)
        assert run.reused == STEPS - 1
        assert run.flops_saved == (STEPS - 1) * (caption + keys_and_values)
        assert run.projections_reused == (STEPS - 1) * 8
        assert "8 text projections" in handle.report
        assert "GFLOP saved" in str(ck.stats(model))
        assert ck.stats(model).bytes_held == run.peak_bytes == tokens * (7 * WIDTH + TEXT) * 4
        ck.free(model)
        assert ck.stats(model).bytes_held == 0


def test_an_address_that_is_used_again_is_no_prompt_that_is_used_again() -> None:
    """U11: other embeddings in the same memory, in another tensor that shares no version with the first."""
    storage, addresses = numpy.empty((1, 5, TEXT), dtype=numpy.float32), set()

    def prompts(step: int) -> list[Tensor]:
        storage[:] = text(step // 3).numpy()
        prompt = torch.from_numpy(storage)
        addresses.add(prompt.data_ptr())
        return [prompt]

    base = loop(CrossStack(), lambda step: [text(step // 3)], 9)
    model = CrossStack()
    with ck.cached(model, "text_kv"):
        assert same(loop(model, prompts, 9), base)
        assert pattern(model) == "##.#..#.."
    assert len(addresses) == 1


def test_a_prompt_overwritten_in_place_is_noticed() -> None:
    base = loop(CrossStack(), lambda step: [text(step // 3)])
    model, prompt = CrossStack(), text(0)
    with ck.cached(model, "text_kv"):
        outputs = loop(model, lambda step: [prompt], at_step=lambda step: step == 3 and prompt.copy_(text(1)))
        assert pattern(model) == "##.#.."
    assert same(outputs, base)


def test_equal_prompts_in_other_objects_are_the_same_prompt_at_one_comparison_a_call() -> None:
    model = CrossStack()
    base = loop(model)
    with ck.cached(model, "text_kv"):
        loop(model)
        assert same(loop(model, lambda step: [text()]), base)
        assert pattern(model) == "#....."
        run = ck.stats(model).last
        assert run is not None
        # The timestep of a bare denoiser, the branch, and the copy of the prompt.
        assert {decision.syncs for decision in run.decisions[2:]} == {3}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_a_prompt_schedule_is_never_stale(mode: Any) -> None:
    """New embeddings in every step: to the rest of the engine they look like something computed from the latents."""

    def prompts(step: int) -> list[Tensor]:
        return [text(min(step, 7))]

    base = loop(CrossStack(), prompts, 12)
    model = CrossStack()
    with mode(), ck.cached(model, "text_kv"):
        assert same(loop(model, prompts, 12), base)
        assert "." not in pattern(model)[:8]
        assert pattern(model).endswith("..."), "once it settles it is reused"


def test_an_argument_that_the_text_does_not_depend_on_does_not_matter() -> None:
    """Hints computed from the latents change in every step."""

    def run(model: nn.Module) -> list[Tensor]:
        hints = [{"encoder_hidden_states": text(), "control": torch.zeros(1, 4, WIDTH)}]
        return bare_loop(
            model, 9, noise(), conditions=hints, at_step=lambda step: hints[0].update(control=noise() * step)
        )

    model = CrossStack()
    base = run(model)
    with ck.cached(model, "text_kv"):
        assert same(run(model), base)
        assert pattern(model).endswith(".....")


@pytest.mark.parametrize("scaled", ["tensor", "item", "tolist"])
def test_text_that_depends_on_the_timestep_is_not_constant(scaled: str) -> None:
    """However the timestep gets there. What goes through `tolist` leaves no trace, and is found by its values."""
    model = CrossStack(scaled=scaled)
    base = loop(model)
    with ck.cached(model, "text_kv"), counted_linears(model) as counts:
        for _ in range(2):
            with pytest.warns(ck.CacheWarning, match="nothing"):
                outputs = loop(model)
            assert same(outputs, base)
        assert counts[KEYS] == 2 * STEPS


def test_joint_attention_says_that_nothing_is_constant() -> None:
    model = CrossStack(joint=True)
    base = loop(model)
    with ck.cached(model, "text_kv") as handle:
        with pytest.warns(ck.CacheWarning, match="nothing constant here") as caught:
            outputs = loop(model)
        assert len(caught) == 1
        assert same(outputs, base)
        assert "nothing constant here" in handle.report
        (note,) = ck.stats(model).last.notes  # type: ignore[union-attr]
        assert "joint" in note
        assert ck.stats(model).reused == 0
        assert ck.stats(model).bytes_held == 0


def test_strict_raises_where_nothing_is_constant() -> None:
    model = CrossStack(joint=True)
    ck.enable_cache(model, "text_kv", strict=True)
    with pytest.raises(ck.UnsupportedModelError, match="nothing constant here"):
        loop(model)
    assert not ck.is_cache_enabled(model)
    assert not hooked(model)


def test_a_timestep_that_is_a_number_cannot_be_followed() -> None:
    model = CrossStack()
    times = [float(step) for step in range(STEPS, 0, -1)]
    conditions = [{"encoder_hidden_states": text()}]
    base = bare_loop(model, STEPS, noise(), times=times, conditions=conditions)
    with ck.cached(model, "text_kv"):
        with pytest.warns(ck.CacheWarning, match="pass it as a tensor"):
            outputs = bare_loop(model, STEPS, noise(), times=times, conditions=conditions)
        assert same(outputs, base)
        assert "." not in pattern(model)


def test_code_that_writes_into_keys_does_not_reach_what_is_kept() -> None:
    model = CrossStack(writes=True)
    base = loop(model)
    with ck.cached(model, "text_kv"):
        assert same(loop(model), base)
        assert pattern(model) == "##...."


def _changes() -> dict[str, Callable[[CrossStack], Any]]:
    def replace(model: CrossStack) -> None:
        new = nn.Linear(WIDTH, WIDTH).requires_grad_(False).eval()
        torch.nn.init.constant_(new.weight, 0.25)
        torch.nn.init.zeros_(new.bias)
        model.blocks[0].attn.to_k = new

    return {
        "in place": lambda model: model.blocks[0].attn.to_k.weight.mul_(2),
        "caption in place": lambda model: model.caption.linear_1.bias.add_(1),
        "replaced module": replace,
        "double": lambda model: model.double(),
    }


@pytest.mark.parametrize("change", _changes().values(), ids=_changes())
def test_changed_weights_are_noticed(change: Callable[[CrossStack], Any]) -> None:
    def run(model: CrossStack) -> list[Tensor]:
        def between(step: int) -> None:
            if step == 3:
                change(model)

        x, prompt, outputs = noise(), text(), []
        with torch.no_grad():
            for step in range(9):
                between(step)
                dtype = model.caption.linear_1.weight.dtype
                time = torch.tensor(9.0 - step)
                outputs.append(model((x + step / 8).to(dtype), time, prompt.to(dtype))[0])
        return outputs

    base = run(CrossStack())
    model = CrossStack()
    with ck.cached(model, "text_kv"):
        assert same(run(model), base)
        assert pattern(model)[:4] == "##.#"
        assert pattern(model)[-1] == "."
    assert not hooked(model)


def test_weights_cast_without_a_trace_are_noticed() -> None:
    """`module.to(dtype)` replaces the data of parameters and leaves no version behind."""
    model = CrossStack()
    x, prompt = noise(), text()

    def call(step: int, dtype: torch.dtype) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model.blocks[0].attn.to_k.to(dtype)
            return model(x + step, torch.tensor(9.0 - step), prompt)[0]

    dtypes = [torch.float32] * 3 + [torch.float16] * 3
    base = [call(step, dtype) for step, dtype in enumerate(dtypes)]
    model.load_state_dict(CrossStack().state_dict())
    model.blocks[0].attn.to_k.to(torch.float32)
    model.load_state_dict(CrossStack().state_dict())
    with ck.cached(model, "text_kv"):
        assert same([call(step, dtype) for step, dtype in enumerate(dtypes)], base)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_switched_on_half_way(dtype: torch.dtype) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        outputs, prompt = [], text()
        for step in range(8):
            with torch.no_grad(), torch.autocast("cpu", dtype, enabled=2 < step < 6):
                outputs.append(model(noise() + step, torch.tensor(9.0 - step), prompt)[0])
        return outputs

    model = CrossStack()
    base = run(model)
    with ck.cached(model, "text_kv"):
        assert same(run(model), base)
        assert "." in pattern(model)


def test_inference_mode_and_back() -> None:
    def run(model: nn.Module) -> list[Tensor]:
        outputs, prompt = [], text()
        for step in range(9):
            with torch.inference_mode() if step // 3 % 2 else torch.no_grad():
                outputs.append(model(noise() + step, torch.tensor(9.0 - step), prompt)[0].clone())
        return outputs

    model = CrossStack()
    base = run(model)
    with ck.cached(model, "text_kv"):
        outputs = run(model)
        assert same(outputs, base)
        assert pattern(model) == "##......."
        assert [output.is_inference() for output in outputs] == [output.is_inference() for output in base]


def test_gradients_flow_where_they_are_enabled() -> None:
    model, prompt = CrossStack(), text().requires_grad_()
    with ck.cached(model, "text_kv"):
        loop(model, [prompt.detach()])
        model(noise(), torch.tensor(0.5), prompt)[0].sum().backward()
        assert prompt.grad is not None
        assert prompt.grad.abs().sum() > 0
        assert reasons(model)[-1] == "gradients are enabled"


def test_training_mode_is_left_alone() -> None:
    model = CrossStack(dropout=0.5)
    with ck.cached(model, "text_kv"):
        loop(model)
        model.train()
        torch.manual_seed(0)
        outputs = loop(model)
        assert "." not in pattern(model)
        assert "eval()" in reasons(model)[-1]
        model.eval()
        model.caption.train()
        torch.manual_seed(0)
        assert not same(loop(model), outputs[:1])
        assert "." not in pattern(model), "one module in training mode is enough"
    model.train()
    torch.manual_seed(0)
    assert same(loop(model), outputs)


def test_another_prompt_size_batch_and_an_aborted_run_in_between() -> None:
    model = CrossStack()
    runs: list[Callable[[], list[Tensor]]] = [
        lambda: loop(model, [text(1), text(2)]),
        lambda: loop(model, [text(3)]),
        lambda: loop(model, [text(4, tokens=9), text(5, tokens=2)]),
        lambda: bare_loop(model, 4, noise(2, 7), conditions=[{"encoder_hidden_states": text(6, 2)}]),
        lambda: loop(model, [text(1), text(2)]),
    ]
    bases = [run() for run in runs]

    def explode(step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with ck.cached(model, "text_kv"):
        for run, base in zip(runs, bases, strict=True):
            with pytest.raises(KeyboardInterrupt):
                loop(model, [text(7), text(8)], at_step=explode)
            assert same(run(), base)


def test_an_exception_while_the_first_call_is_traced_leaves_no_hooks() -> None:
    model = CrossStack()
    base = loop(model)
    bomb = model.blocks[1].register_forward_pre_hook(lambda module, args: 1 / 0)
    with ck.cached(model, "text_kv"):
        with pytest.raises(ZeroDivisionError):
            loop(model)
        assert not hooked(model)
        bomb.remove()
        assert same(loop(model), base)
        assert pattern(model) == "##...."


def test_only_what_is_reused_stays_hooked() -> None:
    model = CrossStack(2)
    with ck.cached(model, "text_kv"):
        loop(model)
        keys = {f"blocks.{i}.attn.{name}" for i in range(2) for name in ("to_k", "to_v")}
        assert hooked(model) == {"caption", *keys}
        twin = copy.deepcopy(model)
    assert not hooked(twin)


class _Shared(CrossStack):
    """One projection for all blocks."""

    def __init__(self) -> None:
        super().__init__(2)
        for block in self.blocks:
            block.attn.to_k = self.blocks[0].attn.to_k
        self.blocks[1].attn.to_v = nn.Linear(WIDTH, WIDTH).requires_grad_(False).eval()


def test_a_module_that_is_called_twice_is_not_taken() -> None:
    """Where calls are skipped, the n-th call need not be what it was."""
    model = _Shared()
    base = loop(model)
    with ck.cached(model, "text_kv"), counted_linears(model) as counts:
        assert same(loop(model), base)
        assert counts["blocks.0.attn.to_k"] == 2 * STEPS
        assert counts["blocks.0.attn.to_v"] == 2


class _Notebook(nn.Module):
    """A projection that also writes down, in a buffer, how often it ran."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("count", torch.zeros(()))

    def forward(self, context: Tensor) -> Tensor:
        self.count.add_(1)
        return self.inner(context)


def test_a_module_that_does_more_than_return_is_called() -> None:
    model = CrossStack()
    model.blocks[0].attn.to_k = _Notebook(model.blocks[0].attn.to_k)
    with ck.cached(model, "text_kv"), counted_linears(model) as counts:
        loop(model)
        assert model.blocks[0].attn.to_k.count == STEPS
        assert counts["blocks.0.attn.to_k.inner"] == 2


def test_results_may_lie_elsewhere_but_in_no_other_dtype() -> None:
    model = CrossStack()
    base = loop(model)
    with ck.cached(model, ck.TextKVCacheConfig(cache_device="cpu")):
        assert same(loop(model), base)
        assert ck.stats(model).bytes_held > 0
    with pytest.raises(ck.ConfigError, match="cache_dtype"):
        ck.TextKVCacheConfig(cache_dtype=torch.float16)


def test_configs() -> None:
    assert to_config(diffusers.TextKVCacheConfig(), {}) == to_config("text_kv", {}) == ck.TextKVCacheConfig()
    assert find_strategy(ck.TextKVCacheConfig()).lossless


def test_models_without_text_are_refused() -> None:
    with pytest.raises(ck.UnsupportedModelError, match="no text"):
        ck.enable_cache(CASES["unet-1d"].build(), "text_kv")

    class Plain(nn.Module):
        def forward(self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
            return hidden_states

    with pytest.raises(ck.UnsupportedModelError, match="no attention"):
        ck.enable_cache(Plain(), "text_kv")


def test_compiled_blocks_are_refused_before_and_said_after() -> None:
    model = CrossStack()
    model.blocks[1].compile(backend="eager")
    with pytest.raises(ck.UnsupportedModelError, match=r"blocks\.1 is compiled"):
        ck.enable_cache(model, "text_kv")
    assert not ck.is_cache_enabled(model)
    torch._dynamo.reset()
    model = CrossStack()
    base = loop(model)
    with ck.cached(model, "text_kv"):
        loop(model)
        model.blocks[1].compile(backend="eager")
        with pytest.warns(ck.CacheWarning, match=r"blocks\.1 was compiled"):
            outputs = loop(model)
        assert "." not in pattern(model)
        torch.testing.assert_close(outputs, base)
    torch._dynamo.reset()


NAMED = [
    "wan-t2v",
    "ltx-video",
    "pixart-alpha",
    "sana",
    "latte",
    "allegro",
    "cosmos",
    "hunyuan-dit",
    "nucleus-moe",
    "unet-2d-condition",
    "unet-2d-condition-xl",
]


@pytest.mark.parametrize("name", NAMED)
def test_named_models(name: str) -> None:
    """Every cross-attention keeps its two projections, and the projection of the caption comes on top."""
    case = CASES[name]
    model = case.build()
    base = moving_loop(case, model, 5)
    with ck.cached(model, "text_kv"):
        assert same(moving_loop(case, model, 5), base)
        run = ck.stats(model).last
        assert run is not None
        assert (run.calls, run.reused) == (10, 7)
        cross = [
            path
            for path, module in model.named_modules()
            if path.endswith(("attn2.to_k", "attn2.to_v", "add_k_proj", "add_v_proj")) and module is not None
        ]
        assert run.projections_reused // run.reused >= len(cross) > 0
    assert not hooked(model)


@pytest.mark.parametrize("name", ["flux", "sd3", "qwen-image", "cogview4"])
def test_named_joint_models(name: str) -> None:
    case = CASES[name]
    model = case.build()
    with ck.cached(model, "text_kv"):
        with pytest.warns(ck.CacheWarning, match="nothing constant here"):
            moving_loop(case, model, 3)
        assert ck.stats(model).reused == 0


@pytest.mark.parametrize("name", ["wan-t2v", "unet-2d-condition"])
def test_lora_loaded_scaled_switched_and_unloaded(name: str) -> None:
    peft = pytest.importorskip("peft")
    case = CASES[name]

    def load(model: Any) -> None:
        torch.manual_seed(0)
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_k", "to_v"], init_lora_weights=False), "a")
        model.eval()

    events: dict[int, Callable[[Any], Any]] = {
        4: load,
        8: lambda model: model.set_adapters(["a"], [0.25]),
        11: lambda model: model.disable_adapters(),
        14: lambda model: model.enable_adapters(),
        17: lambda model: model.unload_lora(),
    }

    def run(model: nn.Module) -> list[Tensor]:
        inputs, outputs = case.inputs(0), []
        with torch.no_grad():
            for step, time in enumerate(case.timesteps(21)):
                if step in events:
                    events[step](model)
                outputs.append(case.output(model(**case.at(inputs, time, step / 21))))
        return outputs

    base, model = run(case.build()), case.build()
    with ck.cached(model, "text_kv"):
        assert same(run(model), base)
        assert all(pattern(model)[step] == "#" for step in events)
        assert "." in pattern(model)[4:]
    assert not hooked(model)


@pytest.mark.parametrize("kind", ["accelerate", "group", "casting"])
def test_weights_that_live_elsewhere(kind: str) -> None:
    """Offloading and casting swap weights during the call; they are known as weights all the same."""
    case = CASES["wan-t2v"]

    def build() -> Any:
        model: Any = case.build()
        if kind == "accelerate":
            pytest.importorskip("accelerate").cpu_offload(model, execution_device=torch.device("cpu"))
        elif kind == "group":
            diffusers.hooks.apply_group_offloading(
                model,
                onload_device=torch.device("cpu"),
                offload_device=torch.device("cpu"),
                offload_type="leaf_level",
            )
        else:
            for block in model.blocks:
                diffusers.hooks.apply_layerwise_casting(block, torch.float16, torch.float32)
        return model

    model = build()
    base = moving_loop(case, model, 5, branches=1)
    with ck.cached(model, "text_kv"):
        assert same(moving_loop(case, model, 5, branches=1), base)
        assert pattern(model) == "##..."


def test_an_attention_processor_put_in_half_way_is_noticed() -> None:
    """Processors are no modules: torch does not tell when one is replaced."""
    case = CASES["unet-2d-condition"]

    class Louder(diffusers.models.attention_processor.AttnProcessor2_0):
        def __call__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, **more: Any) -> Any:
            context = None if encoder_hidden_states is None else 2 * encoder_hidden_states
            return super().__call__(attn, hidden_states, context, **more)

    def run(model: Any) -> list[Tensor]:
        inputs, outputs = case.inputs(0), []
        with torch.no_grad():
            for step, time in enumerate(case.timesteps(8)):
                if step == 4:
                    model.set_attn_processor(Louder())
                outputs.append(case.output(model(**case.at(inputs, time, step / 8))))
        return outputs

    base, model = run(case.build()), case.build()
    with ck.cached(model, "text_kv"):
        assert same(run(model), base)
        assert pattern(model) == "##..###."


def test_a_pipelines_run_gives_its_memory_back() -> None:
    tiny = TINY["wan"]
    pipe = tiny.build()
    base = tiny.call(pipe, steps=8)
    with ck.cached(pipe, "text_kv"):
        for _ in range(2):
            assert torch.equal(tiny.call(pipe, steps=8), base)
            assert ck.stats(pipe).bytes_held == 0
            assert ck.stats(pipe).peak_bytes > 0
        assert pattern(pipe, "cond") == "#......."
