"""The places that can be skipped. Sites know modules and layouts, and no policy.

A site lives as long as a cache is enabled; for every denoiser call it begins a *pass* that watches the hooked modules
of that call: it records what is computed, or answers in their place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from cachekit.engine.binding import Key, Path, is_floating, items, rebuild, replace_tensors
from cachekit.engine.clock import View
from cachekit.engine.conditioning import Comparer, Conditioning
from cachekit.engine.halves import CallFacts
from cachekit.engine.history import Entry, History, Storage
from cachekit.engine.hooks import Hook, Inner
from cachekit.engine.rules import PlacedPredictor, Predictor


class StructureChangedError(Exception):
    """A reuse met other calls or shapes than the last computed call had; this call has to be computed after all."""


@dataclass(frozen=True)
class Saving:
    """Work that was skipped: calls of projections, and their floating-point operations."""

    projections: int = 0
    flops: int = 0

    def __add__(self, other: Saving) -> Saving:
        return Saving(self.projections + other.projections, self.flops + other.flops)


class Decide(Protocol):
    """Asks guards and gate, once a pass. True means reuse.

    Takes the probe's residual where there is one, and why the site itself cannot reuse, if so.
    """

    def __call__(self, signal: torch.Tensor | None, objection: str | None = None) -> bool: ...


@dataclass(frozen=True)
class Samples:
    """Samples of a batch that decide separately.

    Attributes:
        contexts: the context of each, with its own history.
        reused: for each whether it reuses, once it is decided.
        is_proven: whether computing a part of such a batch is known to give what computing all of it gives.
        prove: says that it is.
        split: says that from now on blocks of this call are run on a part of the batch.
    """

    contexts: tuple[PassContext, ...]
    reused: Callable[[], tuple[bool, ...]]
    is_proven: bool
    prove: Callable[[], None]
    split: Callable[[], None]


@dataclass(frozen=True)
class PassContext:
    """What a pass needs from the engine.

    Attributes:
        now: where the run is.
        branch: name of the guidance branch.
        history: results of this site and branch.
        predictor: what answers for skipped work.
        storage: how results are kept.
        decide: asks guards and gate, once a pass.
        arguments: arguments of the denoiser call by name.
        sources: the latents of this call, for tracing.
        signature: shape, dtype and device of the latents.
        read: reads one number back from the device; counted in the statistics.
        others: other branch -> what this site kept of its newest computed call.
        forced: tells why everything computes in this call, None if it need not; a decision may bring it about.
        conditioning: the arguments without latents and timesteps, flattened.
        comparer: compares tensors of two calls and counts the values read back for it.
        altered: True while the model runs on other arguments than the call was given, such as half of the batch.
        undisturbed: True when the model was given the call's arguments and no other rule has skipped anything in it.
        facts: what the sites of this call tell one another.
        foresee: tells `facts` whether the gate will have another branch computed in this step, so that more is
            predicted from it.
        unwatched: while it is entered, no site sees what the model runs.
        note: something is to be known about this run.
        branches: names of the guidance branches as the user gave them, in the order of their calls.
        samples: the samples of the batch where they decide separately; `decide` is then True when all of them reuse.
    """

    now: View
    branch: str
    history: History
    predictor: Predictor
    storage: Storage
    decide: Decide
    arguments: Mapping[str, Any]
    sources: tuple[torch.Tensor, ...]
    signature: Hashable
    read: Callable[[torch.Tensor], float]
    others: Callable[[], Mapping[str, Entry]] = dict
    forced: Callable[[], str | None] = lambda: None
    conditioning: Conditioning = field(default_factory=lambda: Conditioning({}))
    comparer: Comparer = field(default_factory=Comparer)
    altered: Callable[[], bool] = lambda: False
    undisturbed: Callable[[], bool] = lambda: True
    facts: CallFacts = field(default_factory=CallFacts)
    foresee: Callable[[str], None] = lambda branch: None
    unwatched: Callable[[], AbstractContextManager[None]] = nullcontext
    note: Callable[[str], None] = lambda text: None
    branches: Sequence[str] | None = None
    samples: Samples | None = None

    def predict(self, place: Any, like: torch.Tensor | None = None) -> torch.Tensor | None:
        """The prediction for `place` in the dtype and on the device of `like`; None when nothing is kept for it."""
        steps, values = self.history.values(place, self.facts.runs)
        if not values:
            return None
        if isinstance(self.predictor, PlacedPredictor):
            prediction = self.predictor.predict_at(place, steps, values, self.now)
        else:
            prediction = self.predictor.predict(steps, values, self.now)
        if like is not None:
            return prediction.to(device=like.device, dtype=like.dtype)
        # Handed to the model as it is: code that writes into it must not reach what is kept.
        return prediction.clone() if any(prediction is value for value in values) else prediction


class SitePass:
    """One denoiser call as a site sees it.

    Attributes:
        replaces_model: True when :meth:`around` answers without running anything that another site could watch.
        saving: what was skipped, where a site counts it.
        nothing_kept: what to say when :meth:`finish` has no entry for a computed call.
    """

    replaces_model = False
    saving = Saving()
    nothing_kept = (
        "a computed call could not be kept: its block calls differ from the last ones, write into their input, or "
        "no block stack carries the latents; registering the block class may help"
    )

    def around(self, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pass of the denoiser, or an answer in its place."""
        return inner(*args, **kwargs)

    def passes_by(self, slot: Any) -> bool:
        """True when a call of a hooked module needs nothing from this pass; it then counts as seen."""
        return False

    def will_run(self, slot: Any) -> bool | None:
        """Whether the next call of a hooked module will be computed; None while that is not decided."""
        return True

    def run(self, slot: Any, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a hooked module."""
        return inner(*args, **kwargs)

    def finish(self) -> Entry | None:
        """After the forward pass: the entry of a computed call; None for a reuse or when nothing could be kept.

        Raises:
            StructureChangedError: when a reuse did not come past every place that it should have.
        """
        raise NotImplementedError


class Site:
    """Owns the hooks of one kind of place. `rank` orders the sites of a denoiser from its root inwards.

    `joins_branches` is True when what one branch keeps is used by another in the same step, `splits` when a pass can
    compute some samples of a batch and reuse the others, `is_whole` when a reuse runs nothing of the denoiser.
    `current` is the pass of the call in flight in this thread, `planned` whether a later call of its run is known to
    compute.
    """

    rank = 0
    joins_branches = False
    splits = False
    is_whole = False

    def __init__(self) -> None:
        self.hooks: list[Hook] = []
        self.current: Callable[[], SitePass | None] = lambda: None
        self.spend: Callable[[float], None] = lambda seconds: None
        self.planned: Callable[[], bool | None] = lambda: None

    def begin(self, branch: str, context: PassContext) -> SitePass:
        """Start watching one denoiser call."""
        raise NotImplementedError

    def describe(self) -> str:
        """What is hooked, in a few words."""
        raise NotImplementedError

    def always_runs(self, slot: Any) -> bool:
        """True when a hooked module is computed in every denoiser call, reused or not."""
        return False

    def meet(self, others: Sequence[Site]) -> None:
        """Told which other sites there are on the denoiser, whenever that changes."""

    def compiled(self, module: nn.Module) -> None:
        """Told that `module.compile()` was called, on any module of the process."""

    def forget(self, branch: str) -> None:
        """Learn the structure of a branch anew in its next computed call."""

    def attach(self, module: nn.Module, slot: Any) -> None:
        """Hook `module`; its calls reach the current pass as calls of `slot`."""

        def handler(inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            site_pass = self.current()
            if site_pass is None or site_pass.passes_by(slot):
                return inner(*args, **kwargs)
            started, spent = time.perf_counter(), 0.0

            def timed(*inner_args: Any, **inner_kwargs: Any) -> Any:
                nonlocal spent
                begin = time.perf_counter()
                output = inner(*inner_args, **inner_kwargs)
                spent += time.perf_counter() - begin
                return output

            output = site_pass.run(slot, timed, args, kwargs)
            self.spend(time.perf_counter() - started - spent)
            return output

        self.hooks.append(Hook(module, handler, outlook=SlotOutlook(self, slot)))

    def remove(self) -> None:
        """Take all hooks off and let go of the modules."""
        for hook in reversed(self.hooks):
            hook.remove()
        self.hooks.clear()


class SlotOutlook:
    """What a site tells about the calls of one of its modules."""

    def __init__(self, site: Site, slot: Any) -> None:
        self._site, self._slot = site, slot

    def now(self) -> bool | None:
        site_pass = self._site.current()
        return None if site_pass is None else site_pass.will_run(self._slot)

    def later(self) -> bool | None:
        return True if self._site.always_runs(self._slot) else self._site.planned()


def kept_form(output: Any, covered: Mapping[Key, Any], storage_free: bool) -> Any | None:
    """The form of a result with those parts that must be handed out again as they were.

    Args:
        output: what a module returned.
        covered: parts that are provided otherwise; they become None.
        storage_free: keep shapes only (nothing will read the values).

    Returns:
        None when the result is one covered tensor, so that there is nothing to keep.
    """
    if not isinstance(output, (tuple, list, Mapping)) and None in covered:
        return None
    return rebuild(output, {key: None if key in covered else frozen(part, storage_free) for key, part in items(output)})


def frozen(value: Any, storage_free: bool = False) -> Any:
    """A nested result whose tensors nothing else can write to; with `storage_free` zeros that take no memory."""

    def kept(tensor: torch.Tensor, _: Path) -> torch.Tensor:
        if storage_free:
            return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        return tensor.detach().clone()

    return replace_tensors(value, kept)


def floating_parts(output: Any) -> dict[Key, torch.Tensor]:
    """The parts of a result that can be predicted."""
    return {key: part for key, part in items(output) if is_floating(part)}
