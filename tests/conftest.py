"""Every test runs on one thread and must not leave anything behind on diffusers' classes."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from cachekit.engine import observers


@pytest.fixture(autouse=True, scope="session")
def quick_collections() -> Iterator[None]:
    """What the imports made is not searched at every `gc.collect()`."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def no_configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the user of this machine has configured does not decide what a test does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CACHEKIT_CONFIG", str(tmp_path_factory.mktemp("user") / "config.json"))
        yield


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The models are tiny, and threads that wait for each other are slow when tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def forget_leftovers() -> Iterator[None]:
    """A failed test must not spoil the next: whatever is still enabled is let go."""
    yield
    for engine in list(observers._users):
        engine.remove()
