"""FasterCache: most steps predict the unconditional branch from the conditional one, and extrapolate attention.

Method: Lv et al., "FasterCache: Training-Free Video Diffusion Model Acceleration with High Quality" (2024).

*Guidance.* With u and c the outputs of the unconditional and the conditional branch in the last step s that computed
both, and low / high the parts of a tensor below / above a radius in the frequency plane, step t gives

    u_t = c_t + w_low * low(u_s - c_s) + w_high * high(u_s - c_s)

where w_low is `alpha_low_frequency` inside its window and 1 outside, w_high the same for high frequencies. (The sum is
the paper's: the Fourier transform is linear. diffusers' hook multiplies the weights up from skip to skip; here they
count once, as in the paper's equations.)

*Attention.* With a and b the outputs of the last two computed steps, a step in between gives a + w (a - b), where w
rises from 0 to 1 over the run.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import diffusers
import torch
from pydantic import Field
from torch import nn

from cachekit.engine.attention import attention_kinds
from cachekit.engine.clock import View
from cachekit.engine.discovery import unwrap
from cachekit.engine.levels import LEVELS
from cachekit.engine.rules import GateContext, Guards, GuidanceSpec, ModulesSpec, Rule, Verdict
from cachekit.errors import UnsupportedModelError
from cachekit.strategies.attention_ranges import (
    AttentionConfig,
    Identifiers,
    SkipRange,
    Window,
    attention_modules,
    unlisted,
)
from cachekit.strategies.base import config_class, strategy
from cachekit.strategies.gates import WindowGate
from cachekit.strategies.tunable import Tunable

_RADIUS = 5

Weight = Callable[[nn.Module], float]


@config_class
class FasterCacheConfig(AttentionConfig):
    """Config of FasterCache.

    Noise levels go from 0 (clean) to 1000 (noise); timesteps and sigmas that count from 0 to 1, or that rise during
    sampling, are converted. A window (start, end) holds the levels between its ends.

    Args:
        spatial_attention_block_skip_range: compute attention over the own stream (joint image and text included) every
            n-th step inside its window; None or 1 never skips.
        temporal_attention_block_skip_range: the same for attention along the frames.
        spatial_attention_timestep_skip_range: the window of spatial attention.
        temporal_attention_timestep_skip_range: the window of temporal attention.
        low_frequency_weight_update_timestep_range: window in which the low frequencies of the difference between the
            branches are multiplied by `alpha_low_frequency`.
        high_frequency_weight_update_timestep_range: the same for high frequencies.
        alpha_low_frequency: weight of low frequencies inside their window; 1 outside.
        alpha_high_frequency: the same for high frequencies.
        unconditional_batch_skip_range: compute both branches every n-th step inside the window; 1 always does.
        unconditional_batch_timestep_skip_range: the window in which the unconditional branch may be predicted.
        spatial_attention_block_identifiers: regular expressions searched in the paths of attention modules; those found
            count as spatial. None sorts modules by what they are fed.
        temporal_attention_block_identifiers: the same for temporal attention.
        attention_weight_callback: takes an attention module and returns w; None lets w rise from 0 to 1 over the run.
        low_frequency_weight_callback: takes the denoiser and returns w_low, window or not.
        high_frequency_weight_callback: the same for w_high.
        tensor_format: "BCFHW", "BFCHW" or "BCHW". Height and width are the last two axes in each of them and tokens are
            recognised, so this changes nothing.
        is_guidance_distilled: True when the model has no unconditional branch: attention only.
        current_timestep_callback: returns the current noise level, compared with the windows as it is. Not needed: the
            engine knows it.
    """

    spatial_attention_block_skip_range: SkipRange = 2
    temporal_attention_block_skip_range: SkipRange = None
    spatial_attention_timestep_skip_range: Window = (-1, 681)
    temporal_attention_timestep_skip_range: Window = (-1, 681)
    low_frequency_weight_update_timestep_range: Window = (99, 901)
    high_frequency_weight_update_timestep_range: Window = (-1, 301)
    alpha_low_frequency: float = Field(default=1.1, allow_inf_nan=False)
    alpha_high_frequency: float = Field(default=1.1, allow_inf_nan=False)
    unconditional_batch_skip_range: int = Field(default=5, ge=1)
    unconditional_batch_timestep_skip_range: Window = (-1, 641)
    spatial_attention_block_identifiers: Identifiers = None
    temporal_attention_block_identifiers: Identifiers = None
    attention_weight_callback: Weight | None = None
    low_frequency_weight_callback: Weight | None = None
    high_frequency_weight_callback: Weight | None = None
    tensor_format: Literal["BCFHW", "BFCHW", "BCHW"] = "BCFHW"
    is_guidance_distilled: bool = False
    current_timestep_callback: Callable[[], Any] | None = None


@dataclass(frozen=True)
class AttentionGate:
    """Inside the window compute every n-th step, and whenever both guidance branches are computed.

    An error in one of the outputs is an error of their difference, which guidance multiplies in the steps that follow.
    """

    window: WindowGate

    def decide(self, context: GateContext) -> Verdict:
        if context.refreshes:
            return Verdict(False, reason="both guidance branches are computed")
        return dataclasses.replace(self.window.decide(context), refreshes=False)


@dataclass(frozen=True)
class FrequencyWeights:
    """The last value with its low and its high frequencies weighted. Values end in height and width.

    Attributes:
        low: weight of the low frequencies at a step.
        high: weight of the high ones.
    """

    low: Callable[[View], float]
    high: Callable[[View], float]

    @property
    def depth(self) -> int:
        return 1

    def predict(self, steps: Sequence[int], values: Sequence[torch.Tensor], now: View) -> torch.Tensor:
        low, high = self.low(now), self.high(now)
        if low == high:
            return values[0] * low
        smooth = low_frequencies(values[0])
        return torch.add(low * smooth, values[0] - smooth, alpha=high)


def low_frequencies(planes: torch.Tensor) -> torch.Tensor:
    """The part of `[..., height, width]` (float32) within the radius of the frequency plane; subtract it for the rest.

    The radius is a fifth of the shorter side, counted in cycles per picture; of a row of tokens, a fifth of the row.
    """
    height, width = planes.shape[-2:]
    radius = min([side for side in (height, width) if side > 1], default=0) // _RADIUS
    rows = torch.fft.fftfreq(height, 1 / height, device=planes.device)
    columns = torch.fft.rfftfreq(width, 1 / width, device=planes.device)
    inside = rows[:, None] ** 2 + columns[None, :] ** 2 <= radius**2
    low: torch.Tensor = torch.fft.irfft2(torch.fft.rfft2(planes) * inside, s=(height, width))
    return low


@dataclass(frozen=True)
class Extrapolate:
    """new + w (new - old) from the last two results, with w from the progress of the run or from a callback.

    Without a number of steps the progress is taken from the noise level.

    Attributes:
        weight: takes the path of the module and gives w; None lets w rise from 0 to 1.
    """

    weight: Callable[[str], float] | None = None

    @property
    def depth(self) -> int:
        return 2

    def predict_at(self, place: Any, steps: Sequence[int], values: Sequence[torch.Tensor], now: View) -> torch.Tensor:
        if len(values) < 2:
            return values[0]
        weight = _progress(now) if self.weight is None else self.weight(place[0])
        return torch.lerp(values[0], values[1], -weight)

    def predict(self, steps: Sequence[int], values: Sequence[torch.Tensor], now: View) -> torch.Tensor:
        return self.predict_at((), steps, values, now)


def _progress(now: View) -> float:
    if now.steps is not None:
        return now.step / max(now.steps - 1, 1)
    return 0.5 if now.level is None else 1 - now.level / LEVELS


_ALL_LEVELS = {
    f"{part}_timestep_skip_range": (-1.0, 1001.0)
    for part in ("unconditional_batch", "spatial_attention", "temporal_attention")
}
_TUNABLE = Tunable("unconditional_batch_skip_range", "interval", low=2, variants={"": {}, "all levels": _ALL_LEVELS})


@strategy(
    "fastercache",
    FasterCacheConfig,
    translate=partial(unlisted, diffusers.FasterCacheConfig),
    tunable=_TUNABLE,
)
def fastercache(config: FasterCacheConfig, denoiser: nn.Module) -> list[Rule]:
    """Two kinds of rules: guidance (unless there is none to skip), and each type of attention.

    Raises:
        UnsupportedModelError: the model has no attention of a type that is asked for, or nothing is left to skip.
    """
    guided = not config.is_guidance_distilled and config.unconditional_batch_skip_range > 1
    rules = [_guidance_rule(config, denoiser)] if guided else []
    for kind, modules in _attention(config, denoiser).items():
        gate = AttentionGate(
            WindowGate(
                config.of(kind, "block_skip_range"),
                config.of(kind, "timestep_skip_range"),
                config.current_timestep_callback,
            )
        )
        weight = _of_module(denoiser, config.attention_weight_callback)
        rules.append(
            Rule(ModulesSpec(modules), gate, Extrapolate(weight), Guards(), config.storage, name=f"{kind} attention")
        )
    if not rules:
        raise UnsupportedModelError(
            f"{type(denoiser).__name__} has no attention to extrapolate, and the unconditional branch is left alone "
            f"(is_guidance_distilled=True or unconditional_batch_skip_range=1); use a cache that skips blocks"
        )
    return rules


def _attention(config: FasterCacheConfig, denoiser: nn.Module) -> dict[str, tuple[str, ...]]:
    """Type -> attention modules. Spatial attention is on by default, so a model without it is no error."""
    if config.spatial_attention_block_identifiers is None and "spatial" not in attention_kinds(denoiser):
        config = config.replaced(spatial_attention_block_skip_range=None)
    return attention_modules(config, denoiser)


def _guidance_rule(config: FasterCacheConfig, denoiser: nn.Module) -> Rule:
    callback = config.current_timestep_callback
    gate = WindowGate(config.unconditional_batch_skip_range, config.unconditional_batch_timestep_skip_range, callback)
    weights = FrequencyWeights(
        _weight(
            denoiser,
            config.low_frequency_weight_callback,
            config.alpha_low_frequency,
            config.low_frequency_weight_update_timestep_range,
            callback,
        ),
        _weight(
            denoiser,
            config.high_frequency_weight_callback,
            config.alpha_high_frequency,
            config.high_frequency_weight_update_timestep_range,
            callback,
        ),
    )
    return Rule(GuidanceSpec(), gate, weights, Guards(), config.storage, name="guidance")


def _weight(
    denoiser: nn.Module,
    given: Weight | None,
    alpha: float,
    window: tuple[float, float],
    level_callback: Callable[[], Any] | None,
) -> Callable[[View], float]:
    """Step -> weight: what a callback says, or alpha inside the window and 1 outside."""
    if given is not None:
        whole = _of_module(denoiser, given)
        assert whole is not None
        return lambda now: whole("")

    def weight(now: View) -> float:
        level = now.level if level_callback is None else level_callback()
        return alpha if level is not None and window[0] < float(level) < window[1] else 1.0

    return weight


def _of_module(denoiser: nn.Module, callback: Weight | None) -> Callable[[str], float] | None:
    """The same callback by the path of a module; keeps no model alive."""
    if callback is None:
        return None
    reference = weakref.ref(unwrap(denoiser))

    def weight(path: str) -> float:
        model = reference()
        assert model is not None
        return float(callback(model.get_submodule(path)))

    return weight
