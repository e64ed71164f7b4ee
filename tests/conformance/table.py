"""Writes the support table: `python -m tests.conformance.table docs/conformance.md [--jobs N] [--rows FILE]`.

Every cell is the result of running that strategy's checks on that class, not a declaration. `--rows` keeps finished
cases in a JSON-lines file and goes on from there when it is run again, on the same code.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from .cases import cases
from .outcomes import CaseOutcomes, outcomes_of
from .page import render


def measured(names: list[str], jobs: int) -> Iterator[CaseOutcomes]:
    """The outcomes of these cases, in their order."""
    if jobs == 1:
        yield from map(outcomes_of, names)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(outcomes_of, names)


def kept(path: Path | None) -> dict[str, CaseOutcomes]:
    """Case -> outcomes that an earlier call has finished."""
    if path is None or not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [CaseOutcomes.from_dict(json.loads(line)) for line in lines if line.strip()]
    return {item.case: item for item in found}


def main() -> None:
    """Run what is not finished and write the page atomically."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--rows", type=Path, help="file of finished cases")
    arguments = parser.parse_args()
    names = [case.name for case in cases()]
    found = {name: item for name, item in kept(arguments.rows).items() if name in names}
    missing = [name for name in names if name not in found]
    for item in measured(missing, arguments.jobs):
        found[item.case] = item
        sys.stderr.write(f"{len(found)} of {len(names)}: {item.case}\n")
        if arguments.rows is not None:
            with arguments.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(item.to_dict()) + "\n")
    temporary = arguments.page.with_suffix(".tmp")
    temporary.write_text(render([found[name] for name in names]), encoding="utf-8")
    os.replace(temporary, arguments.page)


if __name__ == "__main__":
    main()
