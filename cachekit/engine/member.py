"""A strategy at work on one denoiser: its rules, each with the site that it rules over, and what it has to say."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from cachekit.engine.rules import CAP_REASON, Rule
from cachekit.engine.stats import DenoiserStats, RunStats
from cachekit.errors import warn

if TYPE_CHECKING:
    from cachekit.engine.sites import Site

FEW_STEPS = 8


class Part:
    """One rule of a strategy and its site.

    `splits` says for forms of the latents why a part of the batch cannot be computed alone; "" where that was shown.
    """

    def __init__(self, member: Member, rule: Rule, site: Site) -> None:
        self.member, self.rule, self.site = member, rule, site
        self.splits: dict[Hashable, str] = {}


class Member:
    """One strategy on one denoiser.

    Args:
        strategy: its registered name.
        label: what the statistics call it.
        owner: what warnings call the denoiser.
        rules: its rules, each with its site.
        lossless: True when it changes no bit.
        strict: raise instead of warn when a computed call turns out to have nothing that can be skipped.
    """

    def __init__(
        self,
        strategy: str,
        label: str,
        owner: str,
        rules: Sequence[tuple[Rule, Site]],
        lossless: bool = False,
        strict: bool = False,
    ) -> None:
        self.strategy, self.label, self.owner = strategy, label, owner
        self.lossless, self.strict = lossless, strict
        self.parts = tuple(Part(self, rule, site) for rule, site in rules)
        self.roll_back: Callable[[], None] = self.remove
        self.notes: list[str] = []
        self.last: RunStats | None = None
        self.runs = self.total_calls = self.total_reused = 0

    def remove(self) -> None:
        """Take off all hooks."""
        for part in self.parts:
            part.site.remove()

    def describe(self) -> str:
        """What is hooked, in a few words."""
        return "; ".join(
            f"{part.rule.name}: {part.site.describe()}" if part.rule.name else part.site.describe()
            for part in self.parts
        )

    def stats(self, name: str, bytes_held: int, ranks: int = 1) -> DenoiserStats:
        """The statistics so far."""
        return DenoiserStats(
            name,
            self.strategy,
            self.label,
            self.describe(),
            self.last,
            self.runs,
            self.total_calls,
            self.total_reused,
            bytes_held,
            list(self.notes),
            ranks,
        )

    def say(self, text: str) -> None:
        """Something is wrong with this cache as such: warn once and keep it in the statistics."""
        if text not in self.notes:
            self.notes.append(text)
            warn(f"{self.label} on {self.owner}: {text}")

    def note(self, stats: RunStats, text: str) -> None:
        """Something is to be known about a run: warn once a run and keep it in its statistics."""
        if text not in stats.notes:
            stats.notes.append(text)
            warn(f"{self.label} on {self.owner}: {text}")

    def sum_up(self, stats: RunStats) -> None:
        """Say what has to be said about a whole run."""
        if stats.ended:
            return
        stats.ended = True
        if any(part.rule.observe is not None for part in self.parts):
            return
        decisions = stats.decisions
        asked = [d for d in decisions if d.score is not None or d.reason == CAP_REASON]
        if decisions and not stats.reused and decisions[-1].reason in stats.notes:
            return
        if not stats.reused and not any(any(d.reused_samples) for d in decisions):
            few = f" With {stats.steps} steps there is little to reuse." if (stats.steps or 0) < FEW_STEPS else ""
            reasons = sorted({d.reason for d in decisions})
            self.note(stats, f"enabled, but nothing was reused in the whole run ({'; '.join(reasons)}).{few}")
        elif asked and all(d.reused or d.reason == CAP_REASON for d in asked) and any(not d.reused for d in asked):
            self.note(stats, "the gate never asked for a computation, only the cap on consecutive reuses did")
