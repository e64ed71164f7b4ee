"""Which strategies can work on one denoiser at the same time."""

from __future__ import annotations

from collections.abc import Sequence

from cachekit.engine.rules import Rule
from cachekit.strategies.base import Strategy


def conflict(
    first: Strategy, first_rules: Sequence[Rule], second: Strategy, second_rules: Sequence[Rule]
) -> str | None:
    """Why two strategies cannot be combined, the same for both orders; None when they can.

    A strategy that changes no bit goes with every other. Two that skip do not: where one skips, the other's results
    grow older than its own rule allows, and neither would notice.
    """
    if first.lossless or second.lossless:
        return None
    (one, one_rules), (two, two_rules) = sorted(
        ((first.name, first_rules), (second.name, second_rules)), key=lambda pair: pair[0]
    )
    places = [dict.fromkeys(rule.site.place for rule in rules) for rules in (one_rules, two_rules)]
    shared = [place for place in places[0] if place in places[1]]
    if shared:
        return f"{one} and {two} would both decide what {' and '.join(shared)} return"
    return (
        f"{one} skips {' and '.join(places[0])} and {two} {' and '.join(places[1])}: where one of them skips, the "
        f"other's results grow older than its own rule allows"
    )
