"""Bytes of weights that were moved or read on behalf of a module: a counter that offloading fills and caches report."""

from __future__ import annotations

import threading
import weakref

from torch import nn

from cachekit.engine.discovery import unwrap

_counters: weakref.WeakKeyDictionary[nn.Module, threading.local] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def count_moved(owner: nn.Module, nbytes: int) -> None:
    """Add `nbytes` of weights of `owner` to what this thread had moved."""
    counter = _counter(owner)
    counter.nbytes = getattr(counter, "nbytes", 0) + nbytes


def take_moved(owner: nn.Module) -> int:
    """Bytes of weights of `owner` moved for this thread since the last call of this function; 0 where none are."""
    counter = _counters.get(unwrap(owner))
    if counter is None:
        return 0
    nbytes: int = getattr(counter, "nbytes", 0)
    counter.nbytes = 0
    return nbytes


def _counter(owner: nn.Module) -> threading.local:
    core = unwrap(owner)
    with _lock:
        counter = _counters.get(core)
        if counter is None:
            counter = _counters[core] = threading.local()
    return counter
