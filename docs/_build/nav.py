"""Adds pages that mkdocs.yml does not list to the navigation, so that a new page shows up by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def listed(nav: Any) -> Iterator[str]:
    """Paths of the pages in a navigation tree."""
    if isinstance(nav, str):
        yield nav
    elif nav:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from listed(item)


def on_config(config: Any) -> Any:
    """mkdocs calls this before it looks for pages."""
    folder, known = Path(config["docs_dir"]), set(listed(config["nav"]))
    found = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.md")))
    more = [name for name in found if name not in known]
    if more:
        config["nav"].append({"More": more})
    return config
