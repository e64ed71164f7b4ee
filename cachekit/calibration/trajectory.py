"""What happens to the latents in one run of a pipeline, recorded at the scheduler."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


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
    """

    steps: list[SchedulerStep] = field(default_factory=list)
    scheduler: Any = None

    @property
    def final(self) -> torch.Tensor:
        """The latents after the last step."""
        return self.steps[-1].result

    def __len__(self) -> int:
        return len(self.steps)


@contextmanager
def recorded(pipe: Any) -> Iterator[Trajectory]:
    """Record every `pipe.scheduler.step` inside the block.

    Raises:
        ValueError: the pipeline has no scheduler with a `step`.
    """
    scheduler: Any = getattr(pipe, "scheduler", None)
    if not hasattr(scheduler, "step"):
        raise ValueError(f"{type(pipe).__name__} has no scheduler to calibrate with")
    trajectory, original = Trajectory(), scheduler.step

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(original).bind(*args, **kwargs).arguments
        arguments.update(arguments.pop("kwargs", {}))
        given = {name: _untouched(value) for name, value in arguments.items()}
        if trajectory.scheduler is None:
            trajectory.scheduler = twin_of(scheduler)
        returned = original(*args, **kwargs)
        result = returned[0] if isinstance(returned, tuple) else returned.prev_sample
        trajectory.steps.append(SchedulerStep(given["model_output"], result.detach().clone(), given))
        return returned

    scheduler.step = step
    try:
        yield trajectory
    finally:
        del scheduler.step


def twin_of(scheduler: Any) -> Any:
    """A copy of a scheduler in its present state, without the recording of :func:`recorded`."""
    twin = object.__new__(type(scheduler))
    twin.__dict__.update(copy.deepcopy({name: value for name, value in vars(scheduler).items() if name != "step"}))
    return twin


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
