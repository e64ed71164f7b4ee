"""An ordered set of devices, and what processes see of it."""

from __future__ import annotations

import pytest

from cachekit.run import RunError
from cachekit.run.devices import device_set, environment


@pytest.mark.parametrize(
    ("text", "cards", "expected"),
    [
        ("cuda:2,cuda:0", 3, ("cuda:2", "cuda:0")),
        (" CUDA:1 , cuda:0,", 2, ("cuda:1", "cuda:0")),
        ("cuda", 3, ("cuda:0", "cuda:1", "cuda:2")),
        ("cuda:0", 1, ("cuda:0",)),
        ("cpu,cpu", 0, ("cpu", "cpu")),
        ("cpu", 8, ("cpu",)),
    ],
)
def test_sets(text: str, cards: int, expected: tuple[str, ...]) -> None:
    assert device_set(text, cards) == expected


@pytest.mark.parametrize(
    ("text", "cards", "message"),
    [
        ("", 2, "empty"),
        (" , ", 2, "empty"),
        ("cuda:2", 2, "torch sees 2"),
        ("cuda", 0, "torch sees 0"),
        ("cuda:0,cuda:0", 2, "stands twice"),
        ("cuda,cuda:0", 2, "stands twice"),
        ("cuda:0,cpu", 2, "one kind of device"),
        ("cuda:0,mps", 2, "got 'mps'"),
        ("cuda:-1", 2, "got 'cuda:-1'"),
        ("gpu", 2, "got 'gpu'"),
    ],
)
def test_what_is_refused(text: str, cards: int, message: str) -> None:
    with pytest.raises(RunError, match=message):
        device_set(text, cards)


def test_cards_are_made_visible_in_order() -> None:
    assert environment(("cuda:2", "cuda:0"), {}) == {"CUDA_VISIBLE_DEVICES": "2,0"}


@pytest.mark.parametrize("name", ["4,5,6", "4, 5, 6", "GPU-aa,GPU-bb,GPU-cc"])
def test_what_is_narrowed_down_already_stays_so(name: str) -> None:
    seen = [part.strip() for part in name.split(",")]
    found = environment(("cuda:2", "cuda:0"), {"CUDA_VISIBLE_DEVICES": name})
    assert found == {"CUDA_VISIBLE_DEVICES": f"{seen[2]},{seen[0]}"}


def test_processes_on_the_cpu_share_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert environment(("cpu", "cpu"), {}) == {"OMP_NUM_THREADS": "4"}
    assert environment(("cpu",) * 16, {}) == {"OMP_NUM_THREADS": "1"}
    assert environment(("cpu", "cpu"), {"OMP_NUM_THREADS": "3"}) == {}
