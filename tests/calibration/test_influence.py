"""The factor of each model output in the final latents, for schedulers of many kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
    PNDMScheduler,
    UniPCMultistepScheduler,
)

from cachekit.calibration.influence import NotAffineError, influences
from cachekit.calibration.trajectory import recorded

from ..toys import latents, toy_pipeline

SCHEDULERS: dict[str, Any] = {
    "flow": FlowMatchEulerDiscreteScheduler(),
    "euler": EulerDiscreteScheduler(),
    "ddim": DDIMScheduler(clip_sample=False),
    "v": DDIMScheduler(clip_sample=False, prediction_type="v_prediction"),
    "pndm": PNDMScheduler(),
    "heun": HeunDiscreteScheduler(),
    "dpm": DPMSolverMultistepScheduler(),
    "unipc": UniPCMultistepScheduler(),
    "ancestral": EulerAncestralDiscreteScheduler(),
    "ddpm": DDPMScheduler(clip_sample=False),
}


def change(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.cos(x) * 0.1


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_change_of_one_output_moves_the_result_by_its_factor(name: str) -> None:
    pipe = toy_pipeline(change=change, scheduler=SCHEDULERS[name])
    with recorded(pipe) as reference:
        pipe(6, x=latents(2))
    factors = influences(reference)
    assert len(factors) == len(reference)
    assert sum(factor != 0 for factor in factors) >= len(factors) - 1, "PNDM throws its first output away"
    assert "step" not in vars(pipe.scheduler)


def test_flow_matching_factors_are_the_sigma_steps() -> None:
    pipe = toy_pipeline(change=change)
    with recorded(pipe) as reference:
        pipe(6)
    assert influences(reference) == pytest.approx(pipe.scheduler.sigmas.diff().tolist(), rel=1e-3)


def test_thresholding_is_noticed() -> None:
    pipe = toy_pipeline(change=change, scheduler=DDIMScheduler(clip_sample=True, clip_sample_range=0.1))
    with recorded(pipe) as reference:
        pipe(6)
    with pytest.raises(NotAffineError, match="not linear"):
        influences(reference)


def test_recording_changes_nothing() -> None:
    for scheduler in SCHEDULERS.values():
        pipe = toy_pipeline(change=change, scheduler=scheduler)
        base = pipe(6)
        with recorded(pipe) as reference:
            assert torch.equal(pipe(6), base)
        assert torch.equal(reference.final, base)
        assert torch.equal(pipe(6), base)
