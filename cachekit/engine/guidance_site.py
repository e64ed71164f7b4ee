"""Site: one of the two branches of classifier-free guidance, predicted from the other one in the same step.

Guidance comes in two forms. With **two calls** a step the branch that is called first is computed; the one called
second is answered without running the model, from the first one's output and the difference that the two had when
both were computed. If the unconditional call comes first, it is the conditional one that is predicted: only the output
of *this* step makes a good prediction, and the first call cannot wait for it. With **one call** on a doubled batch the
model is given the conditional half alone.

A doubled batch is taken for guidance only when the pipeline says that it guides (or the user named two branches), the
other branch has no call of its own, and both halves hold the same latents. Before half of a batch is run for the first
time, the way in which the arguments are halved is tried beside a whole call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cachekit.engine.binding import Path, fill_tensors, replace_tensors
from cachekit.engine.conditioning import TensorLeaf
from cachekit.engine.guidance import PipelineGuidance, conditional_half, partner_of
from cachekit.engine.halves import Half, Way, halves_of, joined, parts_of, ways
from cachekit.engine.history import Entry
from cachekit.engine.hooks import Inner
from cachekit.engine.planes import Planes, planes_of
from cachekit.engine.sites import PassContext, Site, SitePass, StructureChangedError

_OUTPUT, _DIFFERENCE = "output", "difference"
_LATENTS, _FORM_OF_CALL, _SINCE, _PLANES, _HALF, _FORM = "latents", "signature", "since", "planes", "half", "form"
_BOUND = 0.1
_ROUNDINGS, _ROUNDING = 100, 0.01


class GuidanceSite(Site):
    """Hooks nothing: it stands around the denoiser call. Remembers how arguments can be halved.

    Args:
        latents: names of the denoiser's arguments for the noisy latents.
    """

    rank = 0
    joins_branches = True

    def __init__(self, latents: Sequence[str]) -> None:
        super().__init__()
        self.latents = tuple(latents)
        self.halving: dict[Hashable, Way | None] = {}

    def begin(self, branch: str, context: PassContext) -> SitePass:
        partner = partner_of(branch, context.branches, context.others())
        first = None if partner is None else context.others()[partner]
        if first is not None and first.step == context.now.step and _continues(first, context):
            return SecondCall(first, context)
        rows = _even_rows([context.arguments.get(name) for name in self.latents])
        if rows is None or (first is not None and first.passive.get(_FORM_OF_CALL) == context.signature):
            return FirstCall(partner, context)
        guidance = PipelineGuidance.now()
        if guidance.guides or (context.branches is not None and len(context.branches) == 2):
            return DoubledCall(self, rows, guidance, context)
        return FirstCall(partner, context)

    def describe(self) -> str:
        return "the second branch of guidance"


class FirstCall(SitePass):
    """The branch that comes first in a step: computed, and kept for the other one of this step."""

    def __init__(self, partner: str | None, context: PassContext) -> None:
        self._context = context
        newest = context.history.newest
        self._since = context.now.step if newest is None else newest.passive.get(_SINCE, context.now.step)
        self._entry = _entry(context)
        text = "no second branch to predict" if partner is None else "the branch that the other is predicted from"
        context.decide(None, text)
        if partner is not None:
            context.foresee(partner)

    def around(self, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = inner(*args, **kwargs)
        _keep_output(self._entry, output, self._since, self._context)
        return output

    def finish(self) -> Entry:
        return self._entry


class SecondCall(SitePass):
    """The other branch of a step: answered from the first one's output, or computed to learn the difference."""

    def __init__(self, first: Entry, context: PassContext) -> None:
        self._first, self._context = first, context
        self._kept = context.history.newest
        self._entry = _entry(context)
        self._reuse = self.replaces_model = context.decide(None, self._objection())
        context.facts.discards = context.facts.refreshes  # the next call of this branch that runs refreshes again

    def _objection(self) -> str | None:
        kept = self._kept
        if kept is None:
            return None
        if not kept.values or any(kind != _DIFFERENCE for kind, _ in _places(kept)):
            return "no difference between the branches is known yet"
        if kept.passive[_SINCE] != self._first.passive[_SINCE]:
            return "the other branch has started anew"
        for _, path in _places(kept):
            before = self._first.values.get((_OUTPUT, path))
            if before is None or before.shape != kept.values[_DIFFERENCE, path].shape:
                return "the branches return other shapes"
        return None

    def around(self, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._reuse:
            assert self._kept is not None
            return fill_tensors(self._kept.passive[_FORM], self._answer)
        output = inner(*args, **kwargs)
        self._learn(output)
        return output

    def finish(self) -> Entry | None:
        return None if self._reuse else self._entry

    def _answer(self, form: Any, path: Path) -> torch.Tensor:
        if isinstance(form, torch.Tensor):
            return form.clone()
        return _predicted(self._context, path, self._first.values[_OUTPUT, path]).to(form)

    def _learn(self, output: Any) -> None:
        parts = parts_of(output)
        pairs = {path: (self._first.values.get((_OUTPUT, path)), part) for path, part in parts.items()}
        if not pairs or any(first is None or first.shape != part.shape for first, part in pairs.values()):
            return
        self._entry.passive[_SINCE] = self._first.passive[_SINCE]
        self._entry.passive[_FORM] = replace_tensors(output, _without_values)
        _keep_differences(self._entry, pairs, self._kept, PipelineGuidance.now, self._context)


class DoubledCall(SitePass):
    """One call for both branches: all of it, or the conditional half with the other one predicted."""

    def __init__(self, site: GuidanceSite, rows: int, guidance: PipelineGuidance, context: PassContext) -> None:
        self._site, self._rows, self._guidance, self._context = site, rows, guidance, context
        self._listed = any(isinstance(context.arguments.get(name), list) for name in site.latents)
        self._kept = context.history.newest
        self._entry = _entry(context)
        self._key, self._guesses = ways(context.arguments, rows, site.latents)
        self._reuse = context.decide(None, self._objection())
        if self._reuse and not self._halves_are_equal(self._shape()):
            self._reuse = context.decide(None, "the halves of the batch hold other latents")
        half = None if self._kept is None else self._kept.passive.get(_HALF)
        if self._reuse:
            context.facts.runs = half
        elif context.facts.refreshes:
            context.facts.keeps = half

    def _objection(self) -> str | None:
        if self._kept is None:
            return None
        if _HALF not in self._kept.passive:
            return "the halves of the batch are no guidance pair"
        if self._site.halving.get(self._key) is None:
            return "this model cannot be given half of the batch"
        return None

    def around(self, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._reuse:
            return self._half(inner, args, kwargs)
        output = inner(*args, **kwargs)
        self._learn(output)
        if _HALF in self._entry.passive and self._key not in self._site.halving:
            self._site.halving[self._key] = way = self._working_way(output, inner, args, kwargs)
            if way is None:
                self._context.note(
                    "the unconditional half of the batch cannot be left out: the model given half of its arguments "
                    "returns something else than half of its result"
                )
        return output

    def finish(self) -> Entry | None:
        return None if self._reuse else self._entry

    def _half(self, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept, half, way = self._kept, self._context.facts.runs, self._site.halving[self._key]
        assert kept is not None
        assert half is not None
        assert way is not None
        output = self._run(way, half, inner, args, kwargs)
        parts = parts_of(output)
        predicted: dict[Path, torch.Tensor] = {}
        for kind, path in _places(kept):
            part = parts.get(path)
            if part is None or part.shape != kept.values[kind, path].shape:
                raise StructureChangedError
            predicted[path] = _predicted(self._context, path, part).to(part.dtype)
        return joined(output, predicted, half, self._listed)

    def _run(self, way: Way, half: Half, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model on half of the arguments as they arrive here."""
        names = list(self._context.arguments)[: len(args)]
        given = way.take(half, {**dict(zip(names, args, strict=True)), **kwargs})
        return inner(*(given[name] for name in names), **{name: given[name] for name in kwargs})

    def _learn(self, output: Any) -> None:
        halves = halves_of(output, self._rows, self._listed)
        shape = None if self._listed or not halves else next(iter(halves.values()))[0].shape
        is_pair = self._kept is not None and _HALF in self._kept.passive
        if not halves or not (is_pair or self._halves_are_equal(shape)):
            _keep_output(self._entry, output, self._context.now.step, self._context)
            return
        half = self._conditional_half()
        self._entry.passive[_HALF] = half
        pairs = {path: (pair[half.index], pair[half.other.index]) for path, pair in halves.items()}
        _keep_differences(self._entry, pairs, self._kept, lambda: self._guidance, self._context)

    def _conditional_half(self) -> Half:
        kept = None if self._kept is None else self._kept.passive.get(_HALF)
        if kept is not None:
            return kept  # type: ignore[no-any-return]
        if self._context.branches is not None and "cond" in self._context.branches:
            return Half(int(self._context.branches[0] != "cond"))
        found = conditional_half(self._guidance, list(self._context.arguments.values()), self._rows, self._context.read)
        if found is None:
            self._context.note(
                "nothing tells which half of the batch is the conditional one; the second is taken for it "
                '(branches=("cond", "uncond") says otherwise)'
            )
        return found or Half(1)

    def _shape(self) -> torch.Size | None:
        """Shape of half of the result."""
        if self._kept is None or self._listed:
            return None
        return next((tensor.shape for tensor in self._kept.values.values()), None)

    def _halves_are_equal(self, shape: torch.Size | None) -> bool:
        """Whether both halves hold the same latents, and no sample of a half stands in it twice.

        With `shape`, that of half of the result, only what lies inside it counts: pipelines append channels or tokens
        of a picture, which the unconditional branch may lack.
        """
        checks: list[torch.Tensor] = []
        for name in self._site.latents:
            value = self._context.arguments.get(name)
            if isinstance(value, list):
                middle = len(value) // 2
                pairs = list(zip(value[:middle], value[middle:], strict=True))
                if any(first.shape != second.shape for first, second in pairs):
                    return False
                checks += [(first == second).all() for first, second in pairs]
                others = [item for item in value[1:middle] if item.shape == value[0].shape]
                checks += [(item != value[0]).any() for item in others]
            elif isinstance(value, torch.Tensor):
                first, second = (_inside(half.take(value), shape) for half in (Half(0), Half(1)))
                checks.append((first == second).all())
                if len(first) > 1:
                    checks.append((first[1:] != first[:1]).flatten(1).any(1).all())
        return bool(checks) and bool(self._context.read(torch.stack(checks).all()))

    def _working_way(self, output: Any, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Way | None:
        """The way of halving the arguments that gives half of the result; None when none does.

        The first one that is right up to rounding, or else the best one that is nearer to its own branch than to the
        other by far. Costs half a call for each guess.
        """
        half = self._entry.passive[_HALF]
        expected = halves_of(output, self._rows, self._listed)
        best, lowest = None, _BOUND
        with self._context.unwatched(), _same_random_state(self._context.sources[0].device):
            for way in self._guesses():
                try:
                    found = parts_of(self._run(way, half, inner, args, kwargs))
                except Exception:  # whatever a model raises when arguments do not fit together
                    continue
                if any(path not in found or found[path].shape != pair[0].shape for path, pair in expected.items()):
                    continue
                errors = [self._error(found[path], pair, half) for path, pair in expected.items()]
                if max(errors) < lowest:
                    best, lowest = way, max(errors)
                if lowest == 0.0:
                    break
        return best

    def _error(self, found: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], half: Half) -> float:
        """Distance to the own branch, relative to that of the branches; 0 when it is as small as rounding."""
        wanted, other = pair[half.index].float(), pair[half.other.index].float()
        error = torch.linalg.vector_norm(found.float() - wanted)
        rounding = torch.linalg.vector_norm(wanted) * min(_ROUNDINGS * torch.finfo(found.dtype).eps, _ROUNDING)
        distance = torch.linalg.vector_norm(wanted - other)
        return self._context.read(torch.where(error <= rounding, torch.zeros_like(error), error / distance))


def _without_values(tensor: torch.Tensor, path: Path) -> Any:
    return tensor.dtype if tensor.is_floating_point() else tensor.detach().clone()


@contextmanager
def _same_random_state(device: torch.device) -> Iterator[None]:
    """What the model draws inside changes nothing outside."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _entry(context: PassContext) -> Entry:
    return Entry(context.now.step, passive={_FORM_OF_CALL: context.signature})


def _places(entry: Entry) -> list[tuple[str, Path]]:
    return list(entry.values)  # type: ignore[arg-type]


def _keep_output(entry: Entry, output: Any, since: int, context: PassContext) -> None:
    entry.passive[_SINCE] = since
    entry.passive[_LATENTS] = [TensorLeaf.of(tensor) for tensor in context.sources]
    for path, part in parts_of(output).items():
        entry.values[_OUTPUT, path] = part.detach().clone()


def _keep_differences(
    entry: Entry,
    pairs: Mapping[Path, tuple[Any, torch.Tensor]],
    before: Entry | None,
    guidance: Any,
    context: PassContext,
) -> None:
    """Keep second minus first of every pair, and where the picture is in it."""
    known: dict[Path, Planes] = {} if before is None else before.passive.get(_PLANES, {})
    planes = entry.passive[_PLANES] = {}
    for path, (first, second) in pairs.items():
        difference = second.detach().float() - first.detach().float()
        entry.values[_DIFFERENCE, path] = context.storage.keep(difference)
        old = None if before is None else before.values.get((_DIFFERENCE, path))
        if path in known and old is not None and old.shape == difference.shape:
            planes[path] = known[path]
            continue
        planes[path] = planes_of(difference, context.arguments, guidance().size, context.read)
        if planes[path].is_flat:
            context.note(
                f"nothing tells how {planes[path].grid[0]} tokens are laid out as a picture, so frequencies are taken "
                f"along the row of tokens"
            )


def _predicted(context: PassContext, path: Path, first: torch.Tensor) -> torch.Tensor:
    """The second branch in float32, from the first one's output in this step."""
    if not first.numel():
        return first.float()
    steps, values = context.history.values((_DIFFERENCE, path))
    newest = context.history.newest
    assert newest is not None
    planes: Planes = newest.passive[_PLANES][path]
    seen = [planes.see(value.to(device=first.device, dtype=torch.float32)) for value in values]
    return first.float() + planes.back(context.predictor.predict(steps, seen, context.now))


def _continues(first: Entry, context: PassContext) -> bool:
    """Whether the first call of this step had the latents that this one has."""
    leaves: list[TensorLeaf] = first.passive.get(_LATENTS, [])
    if not leaves or len(leaves) != len(context.sources):
        return False
    for leaf, tensor in zip(leaves, context.sources, strict=True):
        now = TensorLeaf.of(tensor)
        if leaf.signature != now.signature or leaf.overwritten():
            return False
        if not leaf.same_object(now) and not context.read((leaf.value() == tensor).all()):
            return False
    return True


def _even_rows(latents: Sequence[Any]) -> int | None:
    """Number of samples when it is even and all latents agree on it, else None."""
    counts = {len(value) for value in latents if isinstance(value, list)}
    counts |= {value.shape[0] if value.ndim else 1 for value in latents if isinstance(value, torch.Tensor)}
    rows = counts.pop() if len(counts) == 1 else 0
    return rows if rows and rows % 2 == 0 else None


def _inside(tensor: torch.Tensor, shape: torch.Size | None) -> torch.Tensor:
    if shape is None or len(shape) != tensor.ndim:
        return tensor
    return tensor[tuple(slice(0, size) for size in shape)]
