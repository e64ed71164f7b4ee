"""SeaCache: the latents, filtered to what is signal at this noise level, say how long a result may be reused.

Method: Chung et al., "SeaCache: Spectral-Evolution-Aware Cache for Accelerating Diffusion Models" (CVPR 2026,
arXiv:2602.18993), on the latents themselves as in diffusers. Early in a run only coarse structure stands out of the
noise, later the details do; a Wiener filter for the noise level of the step keeps what stands out, so that noise that
moves does not count as change. It needs no calibration, and one value is read back per call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BeforeValidator, Field
from torch import nn

from cachekit.engine.discovery import latent_names, unwrap
from cachekit.engine.fields import Channels, Fields, Plan, latent_fields
from cachekit.engine.noise import TimeScale
from cachekit.engine.rules import GateContext, Guards, Measure, Rule, StackSpec, Verdict
from cachekit.strategies.base import CacheConfig, config_class, strategy
from cachekit.strategies.predictors import Taylor
from cachekit.strategies.tunable import Tunable


def _callback(value: Any) -> Any:
    if value is not None and not callable(value):
        raise ValueError("must be a function of (module, args, kwargs), or None")
    return value


Callback = Annotated[Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any] | None, BeforeValidator(_callback)]


@config_class
class SeaCacheConfig(CacheConfig):
    """Config of SeaCache.

    Args:
        threshold: accumulated relative change of the filtered latents below which a step is skipped; 0 never skips.
        residual_order: 0 reuses the last change of the block stack, 1 extrapolates the last two.
        retention_steps: number of steps at the start that always compute.
        cache_end_steps: number of steps at the end that always compute, where a scheduler tells how many there are.
        max_consecutive_cached: at most so many skips in a row; 0 for no limit.
        power_exp: exponent p of the power spectrum |f|^-p that clean latents are taken to have.
        raw_vision_callback: `(module, args, kwargs) -> latents`, a list of (channels, frames, rows, columns) tensors,
            in place of the latents that are found; the arguments of the call come by name in `kwargs`.
        sigma_callback: `(module, args, kwargs) -> share of noise` in 0..1 (flow matching's sigma), in place of the
            scheduler's or the timestep's.
        per_sample: the samples of a batch decide separately; those that need computing are computed, the others
            reuse, and each comes out as it would alone (up to rounding). Not a field of diffusers' config.
    """

    threshold: float = Field(default=0.25, ge=0.0, allow_inf_nan=False)
    residual_order: int = Field(default=1, ge=0, le=1)
    retention_steps: int = Field(default=1, ge=0)
    cache_end_steps: int = Field(default=1, ge=0)
    max_consecutive_cached: int = Field(default=2, ge=0)
    power_exp: float = Field(default=3.0, gt=0.0, allow_inf_nan=False)
    raw_vision_callback: Callback = None
    sigma_callback: Callback = None
    per_sample: bool = Field(default=False, kw_only=True)


class _MissingError(Exception):
    """What the gate lacks in a call."""


class Seen(NamedTuple):
    """The latents of one call, carried to the next call of the branch.

    Attributes:
        filtered: the filtered latents.
        raw: the latents as they are, kept with their `timestep` while timesteps may still fall or rise; taken to fall.
        marks: a number for every sample of every field that tells whether it has changed at all.
        plans: how packed tokens lie.
        total: accumulated change since the last computed step.
        source: what told the noise level.
    """

    filtered: Fields
    raw: Fields
    marks: Fields
    timestep: float | None
    plans: dict[str, Plan]
    source: str
    total: float = 0.0


def sea_filter(field: torch.Tensor, noise: float, power_exp: float) -> torch.Tensor:
    """What stands out of the noise: a Wiener filter per axis of space, with a gain of mean one.

    With s the share of noise and |f|^-p the power of the signal at frequency f, the gain of an axis is
    (1 - s) |f|^-p / ((1 - s)^2 |f|^-p + s^2), divided by its mean; the gains of all axes are multiplied.

    Args:
        field: (samples, channels, *space) of any floating dtype.
        noise: s in 0..1.
        power_exp: p > 0.

    Returns:
        The filtered field in float32. Without axes of space it is the field itself.
    """
    field = field.detach().float()
    if field.ndim < 3:
        return field.clone()
    axes = tuple(range(2, field.ndim))
    spectrum = torch.fft.rfftn(field, dim=axes)
    gain = torch.ones((), device=field.device)
    for axis in axes:
        of_axis = _gain(torch.fft.fftfreq(field.shape[axis], device=field.device), noise, power_exp)
        of_axis = of_axis / of_axis.mean()
        gain = gain.unsqueeze(-1) * of_axis[: spectrum.shape[axis]]  # of the last axis half the spectrum is kept
    filtered: torch.Tensor = torch.fft.irfftn(spectrum * gain, s=field.shape[2:], dim=axes)
    return filtered


def _gain(frequencies: torch.Tensor, noise: float, power_exp: float) -> torch.Tensor:
    noise = min(max(noise, 1e-6), 1.0 - 1e-6)
    signal = 1.0 - noise
    return signal / (signal**2 + noise**2 * frequencies.abs() ** power_exp)


def relative_changes(before: Seen, now: Seen) -> torch.Tensor | None:
    """Relative L1 change of every sample, averaged over its fields; None where the two have other shapes.

    A field that has not changed in a single bit, such as a reference image beside the latents, is left out unless none
    has changed.
    """
    changes = []
    if len(before.filtered) != len(now.filtered):
        return None
    for old, new, old_marks, new_marks in zip(before.filtered, now.filtered, before.marks, now.marks, strict=True):
        if [field.shape for field in old] != [field.shape for field in new]:
            return None
        pairs = zip(old, new, strict=True)
        change = torch.stack([_per_sample(b - a) / (_per_sample(a) + 1e-16) for a, b in pairs])
        moved = torch.stack([b != a for a, b in zip(old_marks, new_marks, strict=True)])
        counted = moved | ~moved.any(dim=0)
        changes.append(torch.where(counted, change, 0.0).sum(dim=0) / counted.sum(dim=0))
    return torch.cat(changes)


def _per_sample(field: torch.Tensor) -> torch.Tensor:
    return field.abs().flatten(1).mean(dim=1)


@dataclass(frozen=True)
class SpectralGate:
    """Reuse while the accumulated relative change of the filtered latents stays below `threshold`.

    Sees every call, computed or not: changes are taken from call to call. One value is read back per decision.

    Attributes:
        config: of the strategy.
        latents: names of the arguments that carry noisy latents.
        channels: what the model's config tells about them.
        module: the denoiser, for the callbacks.
    """

    config: SeaCacheConfig
    latents: tuple[str, ...]
    channels: Channels
    module: Callable[[], nn.Module | None]

    def decide(self, context: GateContext) -> Verdict:
        return self.measure(context).verdict(context)

    def measure(self, context: GateContext) -> Measure:
        try:
            now = self._look(context)
        except _MissingError as missing:
            why = str(missing)
            return Measure(None, lambda score: Verdict(False, reason=why, note=why))
        changes = None if context.carry is None else relative_changes(self._late(context), now)
        if changes is None:
            return Measure(None, lambda score: Verdict(False, reason="no earlier latents to compare with", carry=now))
        return Measure(changes.mean(), partial(self._judge, context.carry.total, now))

    def _judge(self, before: float, now: Seen, change: float | None) -> Verdict:
        assert change is not None
        total = before + change
        reuse = total < self.config.threshold
        reason = f"accumulated change {'<' if reuse else '>='} threshold (noise level from {now.source})"
        return Verdict(reuse, total, reason, now._replace(total=total if reuse else 0.0))

    def attend(self, context: GateContext) -> Any:
        try:
            return self._look(context)
        except _MissingError:
            return None

    def _look(self, context: GateContext) -> Seen:
        """The latents of this call, filtered."""
        plans = {} if context.carry is None else dict(context.carry.plans)
        fields = self._fields(context, plans)
        noise, source = self._noise(context)
        marks = tuple(tuple(field.detach().float().flatten(1).sum(dim=1) for field in group) for group in fields)
        raw: Fields = ()
        if noise is None:
            timestep = _timestep(context)
            noise = TimeScale(timestep, rising=False).noise(timestep)
            raw = tuple(tuple(field.detach().clone() for field in group) for group in fields)
        return Seen(self._filtered(fields, noise), raw, marks, context.now.timestep, plans, source)

    def _late(self, context: GateContext) -> Seen:
        """What was seen last; filtered again where its noise level is known only now."""
        before: Seen = context.carry
        if not before.raw or context.now.scale is None or before.timestep is None:
            return before
        return before._replace(filtered=self._filtered(before.raw, context.now.scale.noise(before.timestep)))

    def _filtered(self, fields: Fields, noise: float) -> Fields:
        return tuple(tuple(sea_filter(field, noise, self.config.power_exp) for field in group) for group in fields)

    def _fields(self, context: GateContext, plans: dict[str, Plan]) -> Fields:
        if self.config.raw_vision_callback is None:
            found = latent_fields(context.arguments, self.latents, self.channels, plans, context.fetch)
            if not found:
                raise _MissingError(
                    f"no latents among {' and '.join(self.latents)} of this call; pass raw_vision_callback"
                )
            return found
        given = self._ask("raw_vision_callback", context)
        fields = list(given) if isinstance(given, (list, tuple)) else []
        if not fields or not all(isinstance(item, torch.Tensor) and item.ndim == 4 for item in fields):
            raise _MissingError("raw_vision_callback gave no list of (channels, frames, rows, columns) tensors")
        return tuple((item[None],) for item in fields)

    def _noise(self, context: GateContext) -> tuple[float | None, str]:
        """Share of noise and what told it; None while a bare denoiser's timesteps may still go either way."""
        now = context.now
        if self.config.sigma_callback is not None:
            sigma = self._ask("sigma_callback", context)
            value = context.read(sigma) if isinstance(sigma, torch.Tensor) else sigma
            if not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
                raise _MissingError("sigma_callback gave no share of noise in 0..1")
            return float(value), "sigma_callback"
        if now.noise is not None:
            return now.noise, now.noise_source
        if now.scale is None:
            return None, "the timestep"
        return now.scale.noise(_timestep(context)), f"the {'rising' if now.scale.rising else 'falling'} timestep"

    def _ask(self, name: str, context: GateContext) -> Any:
        """The answer of a callback; one that fails is missing."""
        module = self.module()
        try:
            return None if module is None else getattr(self.config, name)(module, (), dict(context.arguments))
        except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise _MissingError(f"{name} failed: {error!r}") from None


def _timestep(context: GateContext) -> float:
    if context.now.timestep is None:
        raise _MissingError("neither a scheduler nor a timestep tells the noise level; pass sigma_callback")
    return context.now.timestep


_TUNABLE = Tunable(
    "threshold",
    "threshold",
    low=0.002,
    high=16.0,
    start=0.25,
    variants={"": {}, "no cap": {"max_consecutive_cached": 0}},
)


@strategy("seacache", SeaCacheConfig, tunable=_TUNABLE)
def seacache(config: SeaCacheConfig, denoiser: nn.Module) -> list[Rule]:
    """Spectral gate, change of the block stack reused or extrapolated."""
    core = unwrap(denoiser)
    guards = Guards(
        warmup=config.retention_steps,
        ending=config.cache_end_steps,
        max_consecutive=config.max_consecutive_cached or None,
    )
    gate = SpectralGate(config, latent_names(core), Channels.of(core), weakref.ref(core))
    predictor = Taylor(config.residual_order)
    return [Rule(StackSpec(), gate, predictor, guards, config.storage, per_sample=config.per_sample)]
