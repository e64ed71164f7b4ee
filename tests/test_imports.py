"""Imports point one way: a room imports only from itself and from the rooms below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = (
    "errors",
    "files",
    "devices",
    "engine",
    "metrics",
    "strategies",
    "api",
    "mixin",
    "calibration",
    "zoo",
    "inspection",
    "demo",
    "doctor",
    "run",
    "cli",
)
"""Rooms of `cachekit`, from the bottom up."""
PACKAGES = {
    "cachekit": {"cachekit"},
    "offload": {"offload", "cachekit"},
    "recipes": {"recipes", "cachekit", "offload"},
    "benchmarks": {"benchmarks", "cachekit", "offload", "recipes"},
}
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: Path) -> Iterator[str]:
    """Full names of the modules of this project that a file imports when it is imported, or while it runs."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in PACKAGES)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            name = ".".join(part for part in (base, node.module) if part)
            if name.partition(".")[0] in PACKAGES:
                yield from (f"{name}.{alias.name}" if name in PACKAGES else name for alias in node.names)


def room(name: str) -> int | None:
    """How high the room of `cachekit.<room>...` is; None for what the package itself exports."""
    parts = name.split(".")
    known = parts[1].partition("_")[0] if len(parts) > 1 else ""
    return ROOMS.index(known) if known in ROOMS else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    mounts = parts[:2] == ("cachekit", "cli")
    own = room(".".join(parts))
    for name in imported(path):
        package = name.partition(".")[0]
        assert mounts or package in PACKAGES[parts[0]], f"{name} is not for {parts[0]}"
        if own is not None and package == "cachekit":
            height = room(name)
            assert height is None or height <= own, f"{name} lies above"
            assert height is not None or own > ROOMS.index("mixin"), f"{name} pulls in the whole package"


def test_the_rule_finds_what_breaks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_imports.ROOT", tmp_path)
    for name, text in {
        "cachekit/engine/up.py": "from cachekit.api import cached",
        "cachekit/strategies/relative.py": "from ..calibration import tune",
        "cachekit/engine/late.py": "def late():\n    import cachekit",
        "cachekit/demo/out.py": "import offload.modes",
        "offload/out.py": "from recipes import apply",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        with pytest.raises(AssertionError):
            test_imports_point_one_way(path)
