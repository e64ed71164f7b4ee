"""What a profile was made for, and how another pipeline differs from it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import nn

from cachekit.engine.discovery import find_denoisers, unwrap

_PROBED = 64
_TOLERANCE = 0.02


@dataclass(frozen=True)
class DenoiserIdentity:
    """One denoiser.

    Attributes:
        model: class name.
        config: hash of its configuration, "" where it has none.
        dtype: of its weights.
        weights: mean magnitudes of a selection of its parameters; the same in every precision up to rounding.
    """

    model: str
    config: str
    dtype: str
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Identity:
    """What a profile belongs to.

    Attributes:
        pipeline: class name.
        denoisers: component name -> denoiser.
        scheduler: class name.
        scheduler_config: hash of its configuration.
        steps: scheduler steps that were really made.
        shape: shape of the latents of one sample.
        arguments: what the pipeline was called with besides prompts (guidance, size, ...), as text.
        prompts: hash of the prompts.
        versions: of torch, diffusers and cachekit's profile format.
    """

    pipeline: str
    denoisers: dict[str, DenoiserIdentity]
    scheduler: str
    scheduler_config: str
    steps: int
    shape: tuple[int, ...]
    arguments: dict[str, str]
    prompts: str
    versions: dict[str, str]

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Identity:
        """From :meth:`to_json`."""
        data = json.loads(text)
        data["denoisers"] = {
            name: DenoiserIdentity(**{**item, "weights": tuple(item["weights"])})
            for name, item in data["denoisers"].items()
        }
        return cls(**{**data, "shape": tuple(data["shape"])})

    def differences(self, target: Any) -> list[str]:
        """What is different about a pipeline or a denoiser, in words; empty when the profile fits."""
        found = []
        scheduler = getattr(target, "scheduler", None)
        if scheduler is not None:
            if type(scheduler).__name__ != self.scheduler:
                found.append(f"scheduler: {type(scheduler).__name__} instead of {self.scheduler}")
            elif config_hash(scheduler) != self.scheduler_config:
                found.append(f"settings of {self.scheduler}")
        denoisers = find_denoisers(target)
        known = list(self.denoisers.values())
        for name, module in denoisers.items():
            before = self.denoisers.get(name) or (known[0] if len(known) == len(denoisers) == 1 else None)
            if before is None:
                found.append(f"denoiser `{name}` was not calibrated")
            else:
                found += [f"{name or 'denoiser'}: {item}" for item in _denoiser_differences(before, module)]
        return found

    def differences_from(self, other: Identity) -> list[str]:
        """What another identity has otherwise, but for prompts and versions, in words."""
        found = []
        for name in ("pipeline", "scheduler", "steps", "shape"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                found.append(f"{name}: {theirs} instead of {mine}")
        if self.scheduler == other.scheduler and self.scheduler_config != other.scheduler_config:
            found.append(f"settings of {self.scheduler}")
        for name in dict.fromkeys((*self.arguments, *other.arguments)):
            here, there = self.arguments.get(name, "not given"), other.arguments.get(name, "not given")
            if here != there:
                found.append(f"{name}: {there} instead of {here}")
        for name in dict.fromkeys((*self.denoisers, *other.denoisers)):
            before, now = self.denoisers.get(name), other.denoisers.get(name)
            if before is None or now is None:
                found.append(f"denoiser `{name}` is only in one of them")
            else:
                found += [f"{name or 'denoiser'}: {item}" for item in _compared(before, now)]
        return found


def identify(
    pipe: Any, steps: int, shape: Sequence[int], arguments: dict[str, Any], prompts: Sequence[str]
) -> Identity:
    """The identity of a pipeline as it is now."""
    return Identity(
        pipeline=type(pipe).__name__,
        denoisers={name: _denoiser(module) for name, module in find_denoisers(pipe).items()},
        scheduler=type(pipe.scheduler).__name__,
        scheduler_config=config_hash(pipe.scheduler),
        steps=steps,
        shape=tuple(shape),
        arguments={name: _text(value) for name, value in sorted(arguments.items())},
        prompts=_hash("\n".join(prompts)),
        versions={"torch": str(torch.__version__), "diffusers": diffusers.__version__},
    )


def config_hash(configured: Any) -> str:
    """Hash of a diffusers configuration without the entries that begin with an underscore."""
    config = getattr(configured, "config", None)
    if config is None:
        return ""
    entries = {name: value for name, value in dict(config).items() if not str(name).startswith("_")}
    return _hash(json.dumps(entries, sort_keys=True, default=str))


def _denoiser(module: nn.Module) -> DenoiserIdentity:
    core = unwrap(module)
    dtype = next((str(parameter.dtype).removeprefix("torch.") for parameter in core.parameters()), "")
    return DenoiserIdentity(type(core).__name__, config_hash(core), dtype, _magnitudes(core))


def _denoiser_differences(before: DenoiserIdentity, module: nn.Module) -> list[str]:
    return _compared(before, _denoiser(module))


def _compared(before: DenoiserIdentity, now: DenoiserIdentity) -> list[str]:
    found = []
    if now.model != before.model:
        return [f"{now.model} instead of {before.model}"]
    if now.config != before.config:
        found.append("another configuration")
    if len(now.weights) != len(before.weights) or any(
        abs(a - b) > _TOLERANCE * max(abs(a), abs(b), 1e-6) for a, b in zip(now.weights, before.weights, strict=True)
    ):
        found.append("other weights")
    if now.dtype != before.dtype:
        found.append(f"dtype {now.dtype} instead of {before.dtype}")
    return found


def _magnitudes(module: nn.Module) -> tuple[float, ...]:
    """Mean magnitudes of at most `_PROBED` parameters; those on the meta device count as 0."""
    parameters = [parameter for parameter in module.parameters() if parameter.is_floating_point()]
    chosen = parameters[:: max(1, len(parameters) // _PROBED)][:_PROBED]
    return tuple(0.0 if parameter.is_meta else float(parameter.detach().abs().float().mean()) for parameter in chosen)


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} {_hash(str(value.detach().float().cpu().flatten()[:64].tolist()))}"
    return str(value) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
