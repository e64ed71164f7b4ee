"""Every code block in the README and the docs runs as it stands, or is checked as far as it can be without running.

| block | what happens |
|---|---|
| `python` | runs, one after the other, in one folder for each page; a warning of ours fails it |
| `py` | is compiled only: it needs a checkpoint, a card, or minutes |
| `bash` | commands, options, modules and make targets exist; after `<!-- runs -->` those of `cachekit` run |
| `yaml`, `json` | is read |
| `text` | is shown |
"""

from __future__ import annotations

import importlib.util
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
import yaml
from typer.testing import CliRunner

import cachekit
from cachekit import TransformerBlockRegistry
from cachekit.cli import app
from cachekit.strategies import base

from .docs_blocks import ROOT, Block, blocks, pages

LEAVES = {"README.md": ["ratios.safetensors"]}
"""Files that the blocks of a page write."""
LANGUAGES = {"python", "py", "bash", "yaml", "json", "text"}
NAMES = {str(page.relative_to(ROOT)): page for page in pages()}
RUNNING = {
    name: [block for block in blocks(page) if block.language == "python" or block.runs] for name, page in NAMES.items()
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, found in RUNNING.items() if found])
def test_the_blocks_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks of a page run one after the other; a warning of ours fails the page."""
    monkeypatch.chdir(tmp_path)
    known, strategies = dict(TransformerBlockRegistry._entries), dict(base._strategies)
    names: dict[str, object] = {"__name__": "page"}
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("error", cachekit.CacheWarning)
            for block in RUNNING[name]:
                if block.language == "python":
                    exec(compile("\n" * block.line + block.text, name, "exec", dont_inherit=True), names)
                else:
                    run_commands(block)
    finally:
        for registry, before in ((TransformerBlockRegistry._entries, known), (base._strategies, strategies)):
            registry.clear()
            registry.update(before)  # type: ignore[arg-type]
    assert all((tmp_path / file).is_file() for file in LEAVES.get(name, ()))
    prints = any("print(" in block.text for block in RUNNING[name])
    assert capsys.readouterr().out or not prints


def run_commands(block: Block) -> None:
    """Run the `cachekit` commands of a shell block in this process."""
    for words in block.commands():
        assert words[0] == "cachekit", f"line {block.line}: only cachekit commands run here, not {words[0]}"
        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == 0, f"{' '.join(words)}: {result.output}"


@pytest.mark.parametrize("name", NAMES)
def test_blocks_say_what_they_are_and_can_be_read(name: str) -> None:
    for block in blocks(NAMES[name]):
        where = f"{name}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: name one of {sorted(LANGUAGES)} after the opening fence"
        if block.language in ("python", "py"):
            compile("\n" * block.line + block.text, name, "exec", dont_inherit=True)
        elif block.language == "yaml":
            assert yaml.safe_load(block.text) is not None, where
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "bash":
            for words in block.commands():
                problem = unknown(words)
                assert not problem, f"{where}: {' '.join(words)}: {problem}"


def unknown(words: list[str]) -> str:
    """What a command names that does not exist; "" where all does."""
    if words[0] == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        missing = [word for word in words[1:] if "=" not in word and word not in targets]
        return f"no such target: {missing}" if missing else ""
    if words[:2] == ["python", "-m"]:
        return "" if importlib.util.find_spec(words[2]) else f"no such module: {words[2]}"
    if words[0] != "cachekit":
        return ""
    group: Any = typer.main.get_command(app)
    try:
        context = group.make_context("cachekit", words[1:], resilient_parsing=True)
        context.resilient_parsing = False
        name, command, rest = group.resolve_command(context, words[1:])
        command.make_context(name, [word for word in rest if word != "..."], parent=context)
    except Exception as error:
        message = getattr(error, "format_message", None)
        if message is None and type(error).__name__ != "Exit":
            raise
        return "" if message is None else str(message())
    return ""


def test_what_does_not_exist_is_noticed() -> None:
    known = [
        "cachekit demo --all",
        "cachekit run --prompt 'a fox' --out here",
        "make demo",
        "python -m benchmarks.pareto",
    ]
    wrong = ["cachekit draw", "cachekit run --out x --cash taylorseer", "make coffee", "python -m benchmarks.no_such"]
    for line, good in [*((line, True) for line in known), *((line, False) for line in wrong)]:
        (words,) = Block("bash", line, 1, False).commands()
        assert (unknown(words) == "") is good, line


def test_commands_are_found_in_shell_blocks() -> None:
    text = "A=1 cachekit demo --out x  # why\n. .venv/bin/activate && make \\\n  test\ncat x | cachekit run > y\n"
    found = [words[0] for words in Block("bash", text, 1, False).commands()]
    assert found == ["cachekit", ".", "make", "cat", "cachekit"]


def test_pages_are_found() -> None:
    running = {name for name, found in RUNNING.items() if found}
    assert {"README.md", "docs/own-models.md", "docs/caches/first_block.md", "docs/new-strategy.md"} <= running
    assert len(RUNNING["README.md"]) >= 3


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs/reference/cachekit.md").read_text(encoding="utf-8")
    listed = {line.rpartition(".")[2] for line in re.findall(r"^::: (.*)$", text, re.MULTILINE)}
    assert set(cachekit.__all__) - {"__version__"} <= listed


def test_a_strategy_takes_at_most_100_lines() -> None:
    first = next(block for block in blocks(NAMES["docs/new-strategy.md"]) if block.language == "python")
    assert "@strategy(" in first.text
    assert first.text.count("\n") <= 100
