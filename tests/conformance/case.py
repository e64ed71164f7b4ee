"""What a conformance case is, and the decorator that registers one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .enumeration import denoiser_classes
from .weights import redraw, seed_of

Inputs = dict[str, Any]
T = TypeVar("T")

THOUSAND = (981.0, 21.0)  # the scale of DDPM-like schedulers, falling
UNIT = (0.98, 0.02)  # flow matching, falling
RISING = (0.02, 0.98)  # flow matching where 1 is the clean image


class Draw:
    """The source of random inputs of one call. Equal arguments give equal tensors.

    Args:
        name: of the case.
        branch: 0 or 1; other conditioning, same latents.
        batch: number of samples; sample i is the same in every batch size.
        size: 0 or 1; which of two latent sizes `pick` chooses.
    """

    def __init__(self, name: str, branch: int, batch: int, size: int) -> None:
        self.name, self.branch, self.batch, self.size = name, branch, batch, size
        self._count = 0

    def pick(self, first: T, second: T) -> T:
        return second if self.size else first

    def _randn(self, shape: Iterable[int], *key: object) -> Tensor:
        generator = torch.Generator().manual_seed(seed_of(self.name, *key))
        return torch.randn(tuple(shape), generator=generator)

    def _samples(self, shape: tuple[int, ...], *key: object) -> Tensor:
        return torch.stack([self._randn(shape, *key, sample) for sample in range(self.batch)])

    def latents(self, *shape: int) -> Tensor:
        """`[batch, *shape]`, the same in both branches."""
        self._count += 1
        return self._samples(shape, "latents", self._count)

    def cond(self, *shape: int) -> Tensor:
        """`[batch, *shape]`, another value in each branch."""
        self._count += 1
        return self._samples(shape, "cond", self._count, self.branch)

    def ints(self, high: int, *shape: int) -> Tensor:
        """`[batch, *shape]` integers below `high`, other ones in each branch."""
        return (self.cond(*shape).abs() * 7919).long() % high

    def shared(self, *shape: int) -> Tensor:
        """`shape`, the same in both branches and without a batch dimension."""
        self._count += 1
        return self._randn(shape, "shared", self._count)

    def time(self, *tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A placeholder of ones, `[batch, *tokens]`; `Case.at` multiplies it by the timestep."""
        return torch.ones(self.batch, *tokens, dtype=dtype)

    def ones(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(self.batch, *shape, dtype=dtype)

    def fill(self, value: float, *shape: int) -> Tensor:
        return torch.full((self.batch, *shape), value)


@dataclass(frozen=True)
class Case:
    """One denoiser class with one tiny config and the inputs of one way of calling it.

    Attributes:
        name: unique.
        cls: the denoiser class.
        config: keyword arguments of its constructor.
        make: fills the keyword arguments of `forward` from a `Draw`; timesteps are placeholders of ones, or of zeros
            where a token is clean.
        times: the first and the last timestep, in the scale and the direction that the class expects.
        latent_name, timestep_name: the arguments that move during sampling.
        more_latents, more_times: further arguments that move with them (audio beside video, for example).
        kind: "transformer" or "unet".
        unbatched: arguments without a batch dimension, the same in both branches.
        joined: list arguments with one element per sample; other lists hold one tensor per layer.
        supports_batch: whether one call may hold several samples; `batch_note` says why not.
        uses_timestep, uses_conditioning: whether the output depends on them; a few classes ignore one.
        has_sizes: whether `size=1` gives another latent size.
        prepare: a last touch to the built model.
        gain: scale of the random matrices, lowered where full strength makes the output jump between steps.
    """

    name: str
    cls: type[nn.Module]
    config: Mapping[str, Any]
    make: Callable[[Draw], Inputs] = field(repr=False)
    times: tuple[float, float] = THOUSAND
    latent_name: str = "hidden_states"
    timestep_name: str = "timestep"
    more_latents: tuple[str, ...] = ()
    more_times: tuple[str, ...] = ()
    kind: str = "transformer"
    unbatched: frozenset[str] = frozenset()
    joined: frozenset[str] = frozenset()
    supports_batch: bool = True
    batch_note: str = ""
    uses_timestep: bool = True
    uses_conditioning: bool = True
    has_sizes: bool = True
    prepare: Callable[[nn.Module], None] | None = field(default=None, repr=False)
    gain: float = 1.0

    def build(self) -> nn.Module:
        """The model with random weights: float32, eval mode, no gradients."""
        with torch.random.fork_rng():
            torch.manual_seed(seed_of(self.name))
            model = self.cls(**self.config)
        model = model.float().eval().requires_grad_(False)
        redraw(model, seed_of(self.name), self.gain)
        if self.prepare is not None:
            self.prepare(model)
        return model

    def inputs(self, branch: int, batch: int = 1, size: int = 0) -> Inputs:
        """Keyword arguments of `forward` at the first step."""
        if batch > 1 and not self.supports_batch:
            raise ValueError(f"{self.name} takes one sample: {self.batch_note}")
        kwargs = self.make(Draw(self.name, branch, batch, size))
        return self.at(kwargs, self.times[0], 0.0)

    def timesteps(self, n: int) -> list[Tensor]:
        """`n` scalars from the first to the last timestep."""
        return list(torch.linspace(*self.times, n).unbind())

    def at(self, kwargs: Inputs, timestep: Tensor | float, alpha: float) -> Inputs:
        """`kwargs` as they come from `make` or `inputs`, moved to a timestep and a point on the latents' way."""
        moved = self.latents(kwargs, alpha)
        for name in (self.timestep_name, *self.more_times):
            # The sign keeps zeros (clean tokens) at zero, so that this can be applied again and again.
            moved[name] = _map(lambda old, _: (old.sign() * torch.as_tensor(timestep)).to(old.dtype), kwargs[name])
        return moved

    def latents(self, kwargs: Inputs, alpha: float) -> Inputs:
        """A copy of `kwargs` whose latents are `(1 - alpha) * a + alpha * b` for two fixed draws a and b."""
        moved = dict(kwargs)
        for name in (self.latent_name, *self.more_latents):
            moved[name] = _map(functools.partial(self._between, name, alpha), kwargs[name])
        return moved

    def _between(self, name: str, alpha: float, old: Tensor, place: tuple[int, ...]) -> Tensor:
        start, end = (self._rows(name, end, old, place) for end in ("start", "end"))
        return (1 - alpha) * start + alpha * end

    def _rows(self, name: str, end: str, old: Tensor, place: tuple[int, ...]) -> Tensor:
        """Noise like `old`, row by row: a sample does not depend on the batch size, nor a tensor on its neighbours."""
        rows = []
        for row in range(old.shape[0]):
            generator = torch.Generator().manual_seed(seed_of(self.name, name, end, place, row))
            rows.append(torch.randn(old.shape[1:], generator=generator))
        return torch.stack(rows)

    def output(self, result: Any) -> Tensor:
        """The prediction as one tensor whose first dimension is the batch (the tokens, where there is no batch)."""
        fields = list(result.values()) if isinstance(result, Mapping) else result
        if isinstance(fields, Tensor):
            return fields
        tensors = [torch.stack(value) if isinstance(value, list) else value for value in fields if value is not None]
        tensors = [value for value in tensors if isinstance(value, Tensor) and value.is_floating_point()]
        return tensors[0] if len(tensors) == 1 else torch.cat([value.flatten(1) for value in tensors], dim=1)


def _map(function: Callable[[Tensor, tuple[int, ...]], Tensor], value: Any, place: tuple[int, ...] = ()) -> Any:
    """Apply `function(tensor, place)` to every tensor of a nested list."""
    if isinstance(value, (list, tuple)):
        return type(value)(_map(function, item, (*place, index)) for index, item in enumerate(value))
    return function(value, place)


REGISTRY: dict[str, Case] = {}


@functools.cache
def _by_name() -> dict[str, type[nn.Module]]:
    return {cls.__name__: cls for cls in denoiser_classes()}


def case(
    name: str, cls: str, config: Mapping[str, Any], **fields: Any
) -> Callable[[Callable[[Draw], Inputs]], Callable[[Draw], Inputs]]:
    """Register the decorated input builder as a case of the class called `cls`.

    A case whose class is not installed (another version of diffusers) is left out; a class that has got another name
    then fails the coverage test.
    """

    def register(make: Callable[[Draw], Inputs]) -> Callable[[Draw], Inputs]:
        if name in REGISTRY:
            raise ValueError(f"two cases are called {name!r}")
        found = _by_name().get(cls)
        if found is not None:
            known = inspect.signature(found.__init__).parameters
            unknown = sorted(set(config) - set(known))
            if unknown:
                raise TypeError(f"{cls} has no constructor arguments {unknown}")
            REGISTRY[name] = Case(name=name, cls=found, config=dict(config), make=make, **fields)
        return make

    return register
