"""An ordered set of devices, one process each, and how processes are told about it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from cachekit.run.errors import RunError


def device_set(text: str, cards: int) -> tuple[str, ...]:
    """The devices of a run in order, from a list such as "cuda:2,cuda:0" or "cpu,cpu".

    "cuda" alone stands for every card. A card cannot stand twice, the CPU can: each mention is a process.

    Args:
        text: names, separated by commas.
        cards: number of CUDA devices that torch sees.

    Raises:
        RunError: a name that is not accepted, a card that is not there or stands twice, or two kinds of device.
    """
    names = [part.strip().lower() for part in text.split(",") if part.strip()]
    if names == ["cuda"]:
        names = [f"cuda:{number}" for number in range(cards)] or names
    if not names:
        raise RunError("--devices is empty; name devices such as cuda:2,cuda:0 or cpu,cpu")
    unknown = [name for name in names if name != "cpu" and not re.fullmatch(r"cuda(:\d+)?", name)]
    if unknown:
        raise RunError(f"--devices takes cpu, cuda and cuda:N, separated by commas; got {unknown[0]!r}")
    if len({name.partition(":")[0] for name in names}) > 1:
        raise RunError(f"--devices takes one kind of device for a run, got {text!r}")
    if names[0] == "cpu":
        return tuple(names)
    numbers = [number_of(name) for name in names]
    absent = [number for number in numbers if number >= cards]
    if absent:
        raise RunError(f"cuda:{absent[0]} is not available here: torch sees {cards} CUDA devices")
    if len(set(numbers)) < len(numbers):
        raise RunError(f"a card stands twice in --devices {text}; one process runs on each")
    return tuple(f"cuda:{number}" for number in numbers)


def number_of(name: str) -> int:
    """Number of a CUDA device; "cuda" is the first."""
    return int(name.partition(":")[2] or 0)


def environment(devices: Sequence[str], inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that make a process, and those that it starts, see these devices only, as cuda:0, cuda:1, ...

    Args:
        devices: from :func:`device_set`.
        inherited: the environment now; what is already narrowed down there stays so.
    """
    inherited = os.environ if inherited is None else inherited
    if devices[0] == "cpu":
        threads = max((os.cpu_count() or 1) // len(devices), 1)
        return {} if "OMP_NUM_THREADS" in inherited else {"OMP_NUM_THREADS": str(threads)}
    seen = [part.strip() for part in inherited.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    numbers = [number_of(name) for name in devices]
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen[number] if seen else str(number) for number in numbers)}
