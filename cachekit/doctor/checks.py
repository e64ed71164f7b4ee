"""Checks that run something: each passes, or says what is wrong and what to do."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from cachekit.doctor.packages import Package
from cachekit.zoo import load, names
from cachekit.zoo.checksums import damage

STEPS = 6
REINSTALL = "install cachekit again"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what was looked at.
        passed: whether it is as it should be.
        detail: what was found, or what to do.
    """

    name: str
    passed: bool
    detail: str


def guarded(name: str, look: Callable[[], str]) -> Check:
    """A check of something that raises where it fails and otherwise says what it found."""
    try:
        return Check(name, True, look())
    except Exception as error:
        return Check(name, False, " ".join(f"{type(error).__name__}: {error}".split()))


def packages(found: Iterable[Package]) -> Check:
    """Whether all that is needed is there, in versions that will do."""
    listed = list(found)
    problems = [package.problem for package in listed if package.problem]
    if not listed:
        return Check("packages", False, "cachekit is not installed here, it runs from a folder: pip install -e .")
    return Check("packages", not problems, "; ".join(problems) or f"all {len(listed)} fit")


def weights() -> list[Check]:
    """Whether the embedded weights are those that were shipped."""
    return [guarded(f"weights of {name}", lambda name=name: _undamaged(name)) for name in names()]  # type: ignore[misc]


def _undamaged(name: str) -> str:
    problems = damage(name)
    if problems:
        raise RuntimeError(f"{'; '.join(problems)}; {REINSTALL}")
    return "as shipped"


def temporary_folder() -> Check:
    """Whether weights can be written to the place where offloading to disk puts them."""

    def write() -> str:
        with tempfile.TemporaryFile() as file:
            file.write(b"cachekit")
        return "can be written"

    return guarded("temporary folder", write)


def drawing() -> Check:
    """Draws with an embedded pipeline: uncached, cached, and uncached again."""
    return guarded("a cached run", _draw)


def _draw() -> str:
    from cachekit.api import cached, stats

    pipe = load("emoji-flux")
    pipe.set_progress_bar_config(disable=True)

    def run() -> Any:
        noise = torch.Generator().manual_seed(0)
        return pipe("red heart", num_inference_steps=STEPS, generator=noise, output_type="latent").images

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = run()
        with cached(pipe, "taylorseer", cache_interval=2, disable_cache_before_step=1):
            predicted = run()
            last = stats(pipe).last
            skipped = 0 if last is None else last.reused
        again = run()
    if not (torch.isfinite(plain).all() and torch.isfinite(predicted).all()):
        raise RuntimeError("emoji-flux gives NaN; another build of torch may help")
    if not skipped or torch.equal(plain, predicted):
        raise RuntimeError("the cache skipped nothing; please report it")
    if not torch.equal(plain, again):
        raise RuntimeError("the output after switching the cache off is not that of before; please report it")
    return f"{skipped} of {STEPS} calls skipped, bit-identical when switched off"
