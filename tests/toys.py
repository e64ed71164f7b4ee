"""A toy denoiser and a toy pipeline whose every block call is counted and whose residuals are known.

All residuals are dyadic, so that sums are exact and outputs can be compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from pydantic import Field
from torch import Tensor, nn

import cachekit as ck
from cachekit.engine.rules import GateContext, Guards, Rule, StackSpec, Verdict
from cachekit.strategies.base import CacheConfig, config_class, strategy
from cachekit.strategies.predictors import Taylor

WIDTH = 8
Change = Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    """`x + weight * change(x, t)`; `calls` counts its forward passes."""

    def __init__(self, change: Change | None = None, in_place: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()), requires_grad=False)
        self.change, self.in_place, self.calls = change or halves, in_place, 0

    def forward(self, hidden_states: Tensor, temb: Tensor) -> Tensor:
        self.calls += 1
        change = self.weight * self.change(hidden_states, temb)
        if self.in_place:
            return hidden_states.add_(change)
        return hidden_states + change


def halves(hidden_states: Tensor, temb: Tensor) -> Tensor:
    """A constant residual of 0.5."""
    return torch.full_like(hidden_states, 0.5)


def of_time(function: Callable[[Tensor], Tensor]) -> Change:
    """A residual that is a function of the timestep only."""
    return lambda hidden_states, temb: torch.ones_like(hidden_states) * function(temb)


class Stack(nn.Module):
    """Denoiser of `n` blocks: `hidden_states` [batch, tokens, WIDTH], `timestep` a number, [batch] or [batch, tokens].

    `control` (the same shape as the latents) is added after the second block; `encoder_hidden_states` and `guidance`
    are added before the first one.
    """

    def __init__(self, n: int = 4, change: Change | None = None, in_place: Sequence[int] = ()) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(change, in_place=index in in_place) for index in range(n))

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0].weight.dtype

    @property
    def device(self) -> torch.device:
        return self.blocks[0].weight.device

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor | float,
        encoder_hidden_states: Tensor | None = None,
        guidance: Tensor | float | None = None,
        control: Tensor | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        temb = torch.as_tensor(timestep).to(hidden_states.dtype)
        temb = temb.reshape(*temb.shape, *[1] * (hidden_states.ndim - temb.ndim)) if temb.ndim else temb
        x = hidden_states * 1.0
        if encoder_hidden_states is not None:
            x = x + encoder_hidden_states.mean(dim=1, keepdim=True)
        if guidance is not None:
            x = x + guidance
        for index, block in enumerate(self.blocks):
            x = block(x, temb)
            if index == 1 and control is not None:
                x = x + control
        return (x,)

    @property
    def calls(self) -> list[int]:
        """Forward passes of each block."""
        return [block.calls for block in self.blocks]


def latents(batch: int = 1, tokens: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dyadic random latents [batch, tokens, WIDTH]; sample i does not depend on the batch size."""
    rows = []
    for sample in range(batch):
        generator = torch.Generator().manual_seed(1000 * seed + sample)
        rows.append(torch.randint(-16, 17, (tokens, WIDTH), generator=generator) / 8)
    return torch.stack(rows).to(dtype)


def prompt(seed: int = 0, batch: int = 1, tokens: int = 2) -> Tensor:
    """Dyadic conditioning [batch, tokens, WIDTH]."""
    return latents(batch, tokens, seed=77 + seed)


Call = Callable[[nn.Module, Tensor, Tensor, int], list[Tensor]]


@torch.no_grad()
def bare_loop(
    model: nn.Module,
    steps: int = 8,
    x: Tensor | None = None,
    move: float = 0.125,
    times: Sequence[Any] | None = None,
    conditions: Sequence[dict[str, Any]] = ({},),
    at_step: Callable[[int], Any] | None = None,
) -> list[Tensor]:
    """Call `model` as a hand-written sampling loop does, one call per condition and step; all outputs in order."""
    x = latents() if x is None else x
    times = [torch.tensor(float(steps - step)) for step in range(steps)] if times is None else times
    outputs = []
    for step, timestep in enumerate(times):
        if at_step is not None:
            at_step(step)
        for condition in conditions:
            outputs.append(model(x + step * move, timestep, **condition)[0].clone())
    return outputs


class ToyPipeline(DiffusionPipeline):
    """A pipeline around one or two denoisers with any scheduler; `style` says in which form timesteps are passed.

    Styles: "raw" (the entry itself), "expand" (a view of it), "float" (another dtype), "scaled" (divided by 1000),
    "new" (a fresh tensor of equal value).
    """

    _optional_components: ClassVar[list[str]] = ["transformer_2"]

    def __init__(self, transformer: nn.Module, scheduler: Any, transformer_2: nn.Module | None = None) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler, transformer_2=transformer_2)
        self.set_progress_bar_config(disable=True)
        self.guided, self._interrupt = False, False

    @torch.no_grad()
    def __call__(
        self,
        steps: int = 8,
        x: Tensor | None = None,
        style: str = "expand",
        conditions: Sequence[dict[str, Any]] | Callable[[int], Sequence[dict[str, Any]]] = ({},),
        names: Sequence[str] = (),
        begin: int = 0,
        set_begin: bool = True,
        advance: bool = True,
        callback: Callable[[ToyPipeline, int], None] | None = None,
        switch: int = 0,
    ) -> Tensor:
        x = latents() if x is None else x
        self.scheduler.set_timesteps(steps)
        timesteps = self.scheduler.timesteps[begin:]
        if begin and set_begin and hasattr(self.scheduler, "set_begin_index"):
            self.scheduler.set_begin_index(begin)
        self._interrupt = False
        generator = torch.Generator().manual_seed(0)
        with self.progress_bar(total=len(timesteps)):
            for index, t in enumerate(timesteps):
                if self._interrupt:
                    continue
                model = self.transformer_2 if switch and index >= switch else self.transformer
                calls = conditions(index) if callable(conditions) else conditions
                noise = [self._denoise(model, x, t, style, call, names[i : i + 1]) for i, call in enumerate(calls)]
                direction = sum(noise) / len(noise)
                x = self._advance(direction, t, x, generator) if advance else x - direction / 8
                if callback is not None:
                    callback(self, index)
        return x

    def _denoise(
        self, model: nn.Module, x: Tensor, t: Tensor, style: str, call: dict[str, Any], name: Sequence[str]
    ) -> Tensor:
        if hasattr(self.scheduler, "scale_model_input"):
            x = self.scheduler.scale_model_input(x, t)
        timestep = {
            "raw": lambda: t,
            "expand": lambda: t.expand(x.shape[0]),
            "float": lambda: t.expand(x.shape[0]).to(torch.float64),
            "scaled": lambda: t.expand(x.shape[0]).float() / 1000,
            "new": lambda: torch.tensor([float(t)] * x.shape[0]),
        }[style]()
        if name:
            with model.cache_context(name[0]):
                return model(x, timestep, **call)[0]
        return model(x, timestep, **call)[0]

    def _advance(self, direction: Tensor, t: Tensor, x: Tensor, generator: torch.Generator) -> Tensor:
        try:
            return self.scheduler.step(direction, t, x, generator=generator, return_dict=False)[0]
        except TypeError:
            return self.scheduler.step(direction, t, x, return_dict=False)[0]


def toy_pipeline(n: int = 4, change: Change | None = None, scheduler: Any = None) -> ToyPipeline:
    """A toy pipeline with a flow-matching Euler scheduler unless told otherwise."""
    return ToyPipeline(Stack(n, change), scheduler or FlowMatchEulerDiscreteScheduler())


@config_class
class ScriptedConfig(CacheConfig):
    """Test strategy: computes exactly the steps in `computed`, extrapolates with Taylor `order` otherwise."""

    computed: tuple[int, ...] = (0,)
    order: int = Field(default=0, ge=0)


class _Script:
    def __init__(self, computed: tuple[int, ...]) -> None:
        self._computed = computed

    def decide(self, context: GateContext) -> Verdict:
        return Verdict(context.now.step not in self._computed, reason="script")


@strategy("scripted", ScriptedConfig)
def scripted(config: ScriptedConfig, denoiser: nn.Module) -> list[Rule]:
    """Forced decisions."""
    return [Rule(StackSpec(), _Script(config.computed), Taylor(config.order), Guards(warmup=0), config.storage)]


ALWAYS = ck.FirstBlockCacheConfig(threshold=1e9)
"""Reuses whatever can be reused."""


def pattern(target: Any, branch: str | None = None) -> str:
    """The last run as "#" (computed) and "." (reused) per call, of one branch or of all calls in order."""
    run = ck.stats(target).last
    assert run is not None
    decisions = run.decisions if branch is None else run.of(branch)
    return "".join("." if decision.reused else "#" for decision in decisions)


def reasons(target: Any) -> list[str]:
    """Reasons of all decisions of the last run."""
    run = ck.stats(target).last
    assert run is not None
    return [decision.reason for decision in run.decisions]


@contextmanager
def counted_syncs() -> Iterator[list[str]]:
    """Names of the operations that read a value back from the device, as they happen."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
                seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        yield seen


class SyncsPerCall:
    """Counts, at every denoiser call, what was read back since the call began, beside what the statistics say."""

    def __init__(self, pipe: Any, name: str) -> None:
        self.denoiser = getattr(pipe, name)

    def __call__(self, run: Any) -> list[int]:
        counts: list[int] = []
        hook = self.denoiser.__dict__["_compiled_call_impl"]

        def watched(*args: Any, **kwargs: Any) -> Any:
            with counted_syncs() as seen:
                output = hook(*args, **kwargs)
            counts.append(len(seen))
            return output

        self.denoiser.__dict__["_compiled_call_impl"] = watched
        try:
            run()
        finally:
            self.denoiser.__dict__["_compiled_call_impl"] = hook
        return counts
