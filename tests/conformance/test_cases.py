"""The cases themselves: complete, finite, deterministic, and sensitive to what a denoiser must depend on."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .cases import UNBUILDABLE, Case, batched, cases, control_classes, denoiser_classes, run

# May shrink, never grow.
KNOWN_UNBUILDABLE: frozenset[str] = frozenset()
ALL = cases()

pytestmark = pytest.mark.xdist_group("cases")  # shares built models


@pytest.fixture(scope="module", params=ALL, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def model(case: Case) -> nn.Module:
    return case.build()


@torch.no_grad()
def call(case: Case, model: nn.Module, **change: Any) -> Tensor:
    """One forward at the middle of the way, with one thing changed."""
    steps = case.timesteps(10)
    kwargs = case.inputs(change.get("branch", 1), size=change.get("size", 0))
    kwargs = case.at(kwargs, steps[change.get("step", 4)], change.get("alpha", 0.4))
    return case.output(model(**kwargs))


def difference(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().mean() / second.abs().mean())


def test_every_denoiser_class_has_a_case_or_a_reason() -> None:
    covered = {case.cls.__name__ for case in ALL}
    assert {cls.__name__ for cls in denoiser_classes()} == covered | set(UNBUILDABLE)
    assert covered.isdisjoint(UNBUILDABLE)
    assert set(UNBUILDABLE) <= KNOWN_UNBUILDABLE


def test_enumeration_tells_denoisers_from_control_nets_and_the_rest() -> None:
    denoisers = {cls.__name__ for cls in denoiser_classes()}
    controls = {cls.__name__ for cls in control_classes()}
    assert denoisers.isdisjoint(controls)
    assert {"FluxTransformer2DModel", "UNet2DConditionModel", "UNetControlNetXSModel"} <= denoisers
    assert {"ControlNetModel", "FluxControlNetModel"} <= controls
    assert not {name for name in denoisers | controls if "Autoencoder" in name or "VAE" in name}


def test_depends_on_its_inputs_and_is_deterministic(case: Case, model: nn.Module) -> None:
    output = call(case, model)
    assert torch.isfinite(output).all()
    assert torch.equal(output, call(case, model))
    assert difference(call(case, model, alpha=0.5), output) > 1e-4, "latents"
    assert (difference(call(case, model, step=5), output) > 1e-4) == case.uses_timestep, "timestep"
    assert (difference(call(case, model, branch=0), output) > 1e-4) == case.uses_conditioning, "conditioning"
    if case.has_sizes:
        other = call(case, model, size=1)
        assert torch.isfinite(other).all()
        assert other.shape != output.shape


def test_the_same_weights_are_built_again(case: Case, model: nn.Module) -> None:
    first, second = model.state_dict(), case.build().state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_every_block_changes_its_input(case: Case, model: nn.Module) -> None:
    """A block that is the identity makes every reuse exact."""
    changes: dict[str, float] = {}

    def record(name: str, block: nn.Module, args: tuple, kwargs: dict, result: object) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        returned = result if isinstance(result, (tuple, list)) else [result]
        for output in (value for value in returned if isinstance(value, Tensor)):
            same = [value for value in given if value.shape == output.shape]
            if same:
                changes[name] = max([changes.get(name, 0.0), *(difference(output, value) for value in same)])

    hooks = [
        block.register_forward_hook(functools.partial(record, f"{name}.{index}"), with_kwargs=True)
        for name, stack in model.named_children()
        if isinstance(stack, nn.ModuleList)
        for index, block in enumerate(stack)
        if any(True for _ in block.parameters())
    ]
    try:
        call(case, model)
    finally:
        for hook in hooks:
            hook.remove()
    assert not {name: change for name, change in changes.items() if change < 1e-3}


def test_batched_guidance_is_two_calls(case: Case, model: nn.Module) -> None:
    if not case.supports_batch:
        assert case.batch_note
        with pytest.raises(ValueError, match=case.name):
            batched(case, case.inputs(0), case.inputs(1))
        return
    single, joint = run(case, model, steps=2), run(case, model, steps=2, batched_cfg=True)
    assert len(single) == 4
    assert len(joint) == 2
    for step, both in enumerate(joint):
        expected = torch.cat(single[2 * step : 2 * step + 2])
        torch.testing.assert_close(both, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("style", [{"batched_cfg": False}, {"batched_cfg": True}], ids=["two calls", "one call"])
def test_the_loop_moves_smoothly(style: dict[str, bool]) -> None:
    case = next(case for case in ALL if case.name == "flux")
    outputs = run(case, case.build(), steps=10, **style)
    per_step = 1 if style["batched_cfg"] else 2
    assert len(outputs) == 10 * per_step
    moves = [difference(b, a) for a, b in zip(outputs, outputs[per_step:], strict=False)]
    assert min(moves) > 1e-3
    assert max(moves) < 0.9
