"""What happens to the latents in one run of a pipeline, recorded at the scheduler."""

from __future__ import annotations

import copy
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cachekit.engine.noise import noise_levels


@dataclass(frozen=True)
class SchedulerStep:
    """One `scheduler.step`.

    Attributes:
        output: what the pipeline handed over: the guided model output, (batch, ...).
        result: the latents after the step, (batch, ...).
        arguments: all arguments by name.
    """

    output: torch.Tensor
    result: torch.Tensor
    arguments: dict[str, Any]


@dataclass
class Trajectory:
    """The scheduler steps of a run in order.

    Attributes:
        steps: one record per `scheduler.step`.
        scheduler: a copy of the scheduler in its state before the first step; None before that.
        seconds: time from one step to the next, the first from `set_timesteps` on; empty unless it was asked for.
    """

    steps: list[SchedulerStep] = field(default_factory=list)
    scheduler: Any = None
    seconds: list[float] = field(default_factory=list)

    @property
    def final(self) -> torch.Tensor:
        """The latents after the last step."""
        return self.steps[-1].result

    @property
    def noise(self) -> tuple[float, ...]:
        """Share of noise in the latents before each step, 0..1: what flow matching calls sigma."""
        timesteps = [float(value) for value in self.scheduler.timesteps.tolist()]
        return noise_levels(self.scheduler, timesteps).values[-len(self.steps) :]

    def to_host(self) -> None:
        """Keep the recorded latents and outputs in host memory from now on."""
        for index, step in enumerate(self.steps):
            arguments = {**step.arguments, "model_output": None, "sample": step.arguments["sample"].cpu()}
            self.steps[index] = replace(step, output=step.output.cpu(), result=step.result.cpu(), arguments=arguments)

    def __len__(self) -> int:
        return len(self.steps)


@contextmanager
def recorded(pipe: Any, timed: bool = False) -> Iterator[Trajectory]:
    """Record every `pipe.scheduler.step` inside the block.

    Args:
        pipe: a pipeline.
        timed: take the time of each step as well, which waits for the device once a step.

    Raises:
        ValueError: the pipeline has no scheduler with a `step`.
    """
    scheduler: Any = getattr(pipe, "scheduler", None)
    if not hasattr(scheduler, "step"):
        raise ValueError(f"{type(pipe).__name__} has no scheduler to calibrate with")
    trajectory, original, prepare = Trajectory(), scheduler.step, scheduler.set_timesteps
    began = time.perf_counter()

    @functools.wraps(prepare)
    def set_timesteps(*args: Any, **kwargs: Any) -> Any:
        nonlocal began
        result = prepare(*args, **kwargs)
        began = time.perf_counter()
        return result

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal began
        arguments = inspect.signature(original).bind(*args, **kwargs).arguments
        arguments.update(arguments.pop("kwargs", {}))
        given = {name: _untouched(value) for name, value in arguments.items()}
        if trajectory.scheduler is None:
            trajectory.scheduler = twin_of(scheduler)
        returned = original(*args, **kwargs)
        result = returned[0] if isinstance(returned, tuple) else returned.prev_sample
        trajectory.steps.append(SchedulerStep(given["model_output"], result.detach().clone(), given))
        if timed:
            _wait_for(result.device)
            now = time.perf_counter()
            trajectory.seconds.append(now - began)
            began = now
        return returned

    watched: dict[str, Callable[..., Any]] = {"step": step, **({"set_timesteps": set_timesteps} if timed else {})}
    vars(scheduler).update(watched)
    try:
        yield trajectory
    finally:
        for name in watched:
            delattr(scheduler, name)


def twin_of(scheduler: Any) -> Any:
    """A copy of a scheduler in its present state, without the recording of :func:`recorded`."""
    twin = object.__new__(type(scheduler))
    kept = {name: value for name, value in vars(scheduler).items() if name not in ("step", "set_timesteps")}
    twin.__dict__.update(copy.deepcopy(kept))
    return twin


def _wait_for(device: torch.device) -> None:
    """Until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def advance(scheduler: Any, arguments: dict[str, Any], output: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """Let a scheduler make a recorded step with another model output; returns the latents after it.

    Args:
        scheduler: in the state before the step; it moves on.
        arguments: those of the recorded step; random generators in them are copied.
        output: the model output to try.
        sample: the latents before the step.
    """
    given = {name: _untouched(value) for name, value in arguments.items()}
    given |= {"model_output": output, "sample": sample}
    returned = scheduler.step(**given)
    result: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned.prev_sample
    return result


def _untouched(value: Any) -> Any:
    """A copy of what the scheduler could write to or draw from."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        twin = torch.Generator(value.device)
        twin.set_state(value.get_state())
        return twin
    if isinstance(value, list):
        return [_untouched(item) for item in value]
    return value
