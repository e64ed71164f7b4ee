"""The strategies of the package, without those that tests register for themselves."""

from __future__ import annotations

from cachekit.strategies import strategy_named, strategy_names


def shipped_strategies() -> list[str]:
    """Names, sorted."""
    return [name for name in strategy_names() if strategy_named(name).build.__module__.startswith("cachekit.")]
