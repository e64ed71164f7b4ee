"""Schedule: a fixed list of computed steps; the whole denoiser is predicted in between.

Our own strategy. The highest place to skip is the denoiser itself: nothing runs, the state is a few outputs of the
model, and nothing has to be found inside it, so it works for UNets, compiled models and models outside diffusers. The
list of steps and the coefficients of the prediction come from a profile (`cachekit.calibrate`); without one the steps
are given by hand and the prediction is a Taylor extrapolation (Liu et al., "TaylorSeer", 2025).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import nn

from cachekit.engine.clock import View
from cachekit.engine.rules import DenoiserSpec, GateContext, Guards, Rule, Verdict
from cachekit.errors import warn
from cachekit.strategies.base import CacheConfig, config_class, strategy
from cachekit.strategies.predictors import Taylor
from cachekit.strategies.tunable import Sources, Tunable


@runtime_checkable
class Coefficients(Protocol):
    """Where the weights of a prediction come from."""

    def weights(self, step: int, sources: Sequence[int]) -> Sequence[float] | None:
        """Weights for the results of `sources` (newest first), which sum to 1; None to extrapolate instead."""
        ...


@dataclass(frozen=True)
class CoefficientTable:
    """Weights found by calibration: step -> (steps that they belong to, newest first; weights, which sum to 1)."""

    rows: Mapping[int, tuple[tuple[int, ...], tuple[float, ...]]]

    def weights(self, step: int, sources: Sequence[int]) -> Sequence[float] | None:
        known = self.rows.get(step)
        if known is None or known[0] != tuple(sources[: len(known[0])]):
            return None
        return known[1]


@dataclass(frozen=True)
class Combination:
    """Linear combination of the last `depth` computed results.

    Written as the newest result plus weighted differences to it, so that results that do not change are handed out
    bit by bit. Where the weights do not fit the steps really computed (a call was forced to compute in between), a
    Taylor extrapolation of `order` takes their place.
    """

    depth: int
    coefficients: Coefficients | None
    order: int

    def predict(self, steps: Sequence[int], values: Sequence[torch.Tensor], now: View) -> torch.Tensor:
        weights = None if self.coefficients is None else self.coefficients.weights(now.step, steps)
        if weights is None or len(weights) > len(values):
            return Taylor(self.order).predict(steps, values, now)
        newest = values[0]
        result = newest
        for weight, value in zip(weights[1:], values[1:], strict=False):
            result = torch.add(result, value.to(newest.dtype) - newest, alpha=weight)
        return result


@dataclass(frozen=True)
class ListedGate:
    """Compute exactly the listed steps. Reads nothing back; known before the run.

    Attributes:
        computed: branch -> steps; "" serves branches that are not named.
        steps: number of steps that the list was made for; None for any.
    """

    computed: Mapping[str, frozenset[int]]
    steps: int | None

    def decide(self, context: GateContext) -> Verdict:
        if self.steps is not None and context.now.steps is not None and context.now.steps != self.steps:
            return Verdict(False, reason=f"the schedule is for {self.steps} steps, this run has {context.now.steps}")
        computes = context.now.step in self._listed(context.branch)
        return Verdict(not computes, reason="listed step" if computes else "between listed steps")

    def computes(self, branch: str, step: int, steps: int | None) -> bool:
        unfit = self.steps is not None and steps is not None and steps != self.steps
        return unfit or step in self._listed(branch)

    def _listed(self, branch: str) -> frozenset[int]:
        listed = self.computed.get(branch)
        return (self.computed.get("") or next(iter(self.computed.values()))) if listed is None else listed


def _steps(value: Any) -> Any:
    named = value if isinstance(value, Mapping) else {"": value}
    steps: dict[str, tuple[int, ...]] = {}
    for branch, listed in named.items():
        try:
            steps[str(branch)] = tuple(int(step) for step in listed)
        except (TypeError, ValueError):
            raise ValueError("give a list of step numbers, or branch -> list") from None
        if any(isinstance(step, bool) or step != int(step) for step in listed):
            raise ValueError("steps are whole numbers")
    if not steps:
        raise ValueError("it is empty; list at least step 0")
    for listed in steps.values():
        if sorted(set(listed)) != list(listed) or listed[:1] != (0,):
            raise ValueError("steps must rise and begin with 0, which has nothing to predict from")
    return steps


@config_class
class ScheduleCacheConfig(CacheConfig):
    """Config of Schedule.

    Args:
        computed_steps: steps to compute, from 0 and rising; everything else is predicted. Branch -> list gives guidance
            branches lists of their own.
        order: order of the extrapolation where there are no coefficients; 0 reuses.
        num_inference_steps: number of denoiser steps that the list was made for (entries of the scheduler, which for
            2nd-order schedulers are more than the pipeline's argument); a run of another length computes everything.
            None for any.
        coefficients: weights of the prediction, from a profile.
        depth: number of results that coefficients may combine.
        profile: where it comes from; a pipeline that the profile does not fit is refused.
    """

    computed_steps: Annotated[Any, BeforeValidator(_steps)] = Field()
    order: int = Field(default=1, ge=0, le=4)
    num_inference_steps: int | None = Field(default=None, ge=1)
    coefficients: Any = Field(default=None, repr=False)
    depth: int = Field(default=3, ge=1, le=8)
    profile: Any = Field(default=None, repr=False)

    @classmethod
    def from_profile(
        cls,
        profile: Any,
        *,
        speedup: float | None = None,
        computed_steps: int | None = None,
        min_psnr: float | None = None,
        num_inference_steps: int | None = None,
        check: bool = True,
        **fields: Any,
    ) -> ScheduleCacheConfig:
        """The config for a budget; give exactly one of the first three.

        Args:
            profile: from `cachekit.calibrate` or `cachekit.Profile.load`.
            speedup: denoiser calls uncached / computed; the number of computed calls is rounded up.
            computed_steps: number of computed steps.
            min_psnr: dB to the uncached picture that 95 % of the held-back prompts reach.
            num_inference_steps: steps of the runs, as the pipeline counts them; None for those of the profile. Other
                numbers are served by an estimate (see `Profile.resampled`), with a warning.
            check: refuse pipelines that the profile was not made for.
            **fields: further fields of the config.

        Raises:
            ValueError: a budget that the profile has no schedule for, or a number of steps that it cannot serve.
        """
        if num_inference_steps not in (None, profile.num_inference_steps):
            profile = _at(profile, num_inference_steps, speedup, computed_steps, min_psnr)
        point = profile.choose(speedup, computed_steps, min_psnr)
        depth = max((len(weights) for _, weights in point.rows.values()), default=1)
        return cls(
            computed_steps=point.computed_steps,
            num_inference_steps=profile.steps,
            coefficients=CoefficientTable(point.rows) if point.rows else None,
            depth=depth,
            profile=profile if check else None,
            **fields,
        )

    @model_validator(mode="after")
    def _fits(self) -> ScheduleCacheConfig:
        last = max(listed[-1] for listed in self.computed_steps.values())
        if self.num_inference_steps is not None and last >= self.num_inference_steps:
            raise ValueError(
                f"computed_steps: step {last} lies outside of {self.num_inference_steps} steps (0 to "
                f"{self.num_inference_steps - 1})"
            )
        if self.coefficients is not None and not isinstance(self.coefficients, Coefficients):
            raise ValueError("coefficients come from a profile; use ScheduleCacheConfig.from_profile")
        return self


def _at(profile: Any, steps: Any, speedup: float | None, computed_steps: int | None, min_psnr: float | None) -> Any:
    """The profile at another number of steps, with a warning."""
    before = profile.num_inference_steps
    if min_psnr is not None:
        raise ValueError(
            f"min_psnr was measured at {before} steps and says nothing about {steps}; give speedup or computed_steps, "
            f"or calibrate with num_inference_steps={steps}"
        )
    found = profile.resampled(steps, speedup=speedup, computed_steps=computed_steps)
    warn(
        f"a profile of {before} steps is used at {steps}: the schedule and its coefficients are estimated from it and "
        f"lose some dB to a calibration at {steps}"
    )
    return found


def _made_for(config: ScheduleCacheConfig, target: Any) -> None:
    if config.profile is not None:
        config.profile.require(target)


def _examples() -> dict[str, CacheConfig]:
    return {"": ScheduleCacheConfig((0,))}


def _listed(count: int, sources: Sources) -> dict[str, Any]:
    """The schedule of a profile, or evenly spread steps and an extrapolation where there is none."""
    if sources.profile is None:
        last = sources.steps - 1
        spread = {round(i * last / max(count - 1, 1)) for i in range(count)}
        return {"computed_steps": tuple(sorted(spread)), "num_inference_steps": sources.steps}
    chosen = ScheduleCacheConfig.from_profile(sources.profile, computed_steps=count)
    return {name: getattr(chosen, name) for name in _FROM_PROFILE}


def _counts(sources: Sources) -> Sequence[int]:
    if sources.profile is None:
        return range(1, sources.steps)
    return [len(point.computed_steps) for point in sources.profile.front]


_FROM_PROFILE = ("computed_steps", "num_inference_steps", "coefficients", "depth", "profile")
_TUNABLE = Tunable("computed_steps", "steps", low=1, choices=_counts, configure=_listed)


@strategy("schedule", ScheduleCacheConfig, check=_made_for, examples=_examples, tunable=_TUNABLE)
def schedule(config: ScheduleCacheConfig, denoiser: nn.Module) -> list[Rule]:
    """Listed steps, calibrated combination or Taylor, the whole denoiser."""
    gate = ListedGate(
        {branch: frozenset(listed) for branch, listed in config.computed_steps.items()}, config.num_inference_steps
    )
    depth = config.order + 1 if config.coefficients is None else max(config.depth, config.order + 1)
    predictor = Combination(depth, config.coefficients, config.order)
    return [Rule(DenoiserSpec(), gate, predictor, Guards(warmup=0), config.storage)]
