"""An inspection as text for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cachekit.inspection import Inspection


def render(item: Inspection) -> RenderableType:
    """A heading, the facts, and a table of strategies."""
    title = f"{item.name}: {item.model}" if item.name else item.model
    facts = Table.grid(padding=(0, 2))
    facts.add_row("parameters", _count(item.parameters))
    facts.add_row("latents", ", ".join(item.latents) or "none found")
    facts.add_row("timestep", ", ".join(item.timesteps) or "none found")
    for stack in item.stacks:
        classes = ", ".join(f"{count} x {name}" for name, count in stack.classes.items())
        facts.add_row("blocks", f"{stack.name}: {classes}")
    if item.unet is not None:
        facts.add_row("UNet", ", ".join(f"{name} ({count})" for name, count in item.unet.items()))
    facts.add_row("attention", f"{item.attention} modules")
    return Group(Text(title, style="bold"), facts, _strategies(item), Text())


def _strategies(item: Inspection) -> Table:
    table = Table()
    table.add_column("strategy", no_wrap=True)
    table.add_column("attaches")
    table.add_column("where, or why not", overflow="fold")
    for entry in item.strategies:
        table.add_row(entry.name, "yes" if entry.attaches else "no", entry.site if entry.attaches else entry.reason)
    return table


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
