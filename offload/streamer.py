"""Lets groups of weights take turns in two buffers, and fetches ahead what is known to run next."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

from cachekit.engine.discovery import takes_timestep
from cachekit.engine.foresight import runs_later, runs_now
from cachekit.engine.traffic import count_moved
from offload.errors import OffloadError
from offload.layout import Entry, Group
from offload.slots import Slot, Transport
from offload.sources import Source, loaded

_SLOTS = 2


class Route:
    """The groups of one component in the order in which they run; learnt while it runs."""

    def __init__(self, component: nn.Module, groups: Sequence[Group]) -> None:
        self.groups = tuple(groups)
        self.repeats = takes_timestep(component)
        self.moved_bytes = self.moves = 0
        self._component = weakref.ref(component)
        self._order = list(groups)
        self._local = threading.local()

    @property
    def component(self) -> nn.Module:
        component = self._component()
        assert component is not None
        return component

    def passed(self, group: Group) -> None:
        """A group is about to compute. A pass over all groups, each once, tells their order."""
        seen: list[Group] = self._local.__dict__.setdefault("seen", [])
        if group in seen:
            seen.clear()
        seen.append(group)
        if len(seen) == len(self._order):
            self._order = list(seen)

    def next(self, group: Group) -> Group | None:
        """The group that is known to compute next after `group`; None where that is open or there is none."""
        index = self._order.index(group)
        for other in self._order[index + 1 :]:
            runs = runs_now(other.chain(with_component=False))
            if runs is not False:
                return other if runs else None
        if not self.repeats:
            return None
        for other in self._order[: index + 1]:
            runs = runs_later(other.chain(with_component=True))
            if runs is not False:
                return other if runs else None
        return None


class Streamer:
    """Moves the weights of the groups of some components between a source and buffers on the execution device.

    Outside of their module's call parameters are placeholders: of the right shape, dtype and device, without storage,
    filled with bytes that are NaN in every floating-point dtype, so that reading them by mistake shows.

    Args:
        routes: the components.
        source: has the weights of all groups.
        device: where they compute.
        prefetch: fetch the next group while one computes.
    """

    def __init__(self, routes: Sequence[Route], source: Source, device: torch.device, prefetch: bool = True) -> None:
        self.routes, self.source, self.device, self.prefetch = tuple(routes), source, device, prefetch
        self.passing_slots = 0
        self._transport = Transport(device, source)
        self._nbytes = max((group.buffer_bytes for route in routes for group in route.groups), default=0)
        self._slots: list[Slot] = []
        self._clock = 0
        self._lock = threading.RLock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="offload")
        self._placeholders: dict[torch.dtype, torch.Tensor] = {}
        self._held: dict[Group, int] = {}

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers."""
        return _SLOTS * self._nbytes

    def park(self, group: Group) -> None:
        """Turn the parameters of a group into placeholders; their storage is given back."""
        with torch.inference_mode(False), torch.no_grad():
            for entry in group.entries:
                entry.parameter.data = self._placeholder(entry.dtype).expand(entry.shape)

    def restore(self, group: Group) -> None:
        """Give the parameters of a group storage of their own again, where they came from."""
        with torch.inference_mode(False), torch.no_grad():
            for entry, tensor in loaded(self.source, group).items():
                if self.is_parked(entry):
                    entry.parameter.data = tensor
        self.source.forget(group)

    def is_parked(self, entry: Entry) -> bool:
        """False when somebody gave the parameter other data than a placeholder."""
        return entry.parameter.data_ptr() == self._placeholder(entry.dtype).data_ptr()

    def is_held(self, group: Group) -> bool:
        """True while a call computes with the weights of a group."""
        return self._held.get(group, 0) > 0

    def enter(self, route: Route, group: Group) -> Slot:
        """Bring the weights of a group to the execution device and let its parameters be them.

        Raises:
            OffloadError: they cannot be read, or were changed meanwhile.
        """
        with self._lock:
            route.passed(group)
            slot = self._holding(group) or self._assign(route, group, self._free() or self._extra())
            slot.users += 1
            self._clock += 1
            slot.used = self._clock
            filling = slot.filling
        try:
            if filling is not None:
                filling.result()
            with self._lock:
                if not self.is_held(group):
                    self._refuse_changed(group)
                slot.await_ready()
                if not self.is_held(group):
                    group.point_at(slot.buffer)
                self._held[group] = self._held.get(group, 0) + 1
        except BaseException:
            with self._lock:
                slot.users -= 1
                if not slot.users:
                    slot.clear()
                self._drop_if_passing(slot)
            raise
        return slot

    def look_ahead(self, route: Route, group: Group) -> None:
        """Begin to fetch what is known to compute after `group`."""
        if not self.prefetch:
            return
        following = route.next(group)
        if following is None:
            return
        with self._lock:
            if self._holding(following) is None:
                free = self._free()
                if free is not None:
                    self._assign(route, following, free)

    def leave(self, group: Group, slot: Slot) -> None:
        """A call has computed with the weights of a group."""
        with self._lock:
            slot.mark_released()
            slot.users -= 1
            self._held[group] -= 1
            if not self._held[group]:
                del self._held[group]
                self.park(group)
            self._drop_if_passing(slot)

    def close(self) -> None:
        """Stop the thread and let go of the buffers."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._slots.clear()

    def _placeholder(self, dtype: torch.dtype) -> torch.Tensor:
        known = self._placeholders.get(dtype)
        if known is None:
            filler = 0 if dtype is torch.bool else 255
            raw = torch.full((dtype.itemsize,), filler, dtype=torch.uint8, device=self.device)
            known = self._placeholders[dtype] = raw.view(dtype)[0]
        return known

    def _refuse_changed(self, group: Group) -> None:
        changed = [entry.name for entry in group.entries if not self.is_parked(entry)]
        if changed:
            raise OffloadError(
                f"{changed[0]} was given other data while its weights are offloaded; call handle.disable() before "
                f"changing, moving or converting weights, then offload again"
            )

    def _holding(self, group: Group) -> Slot | None:
        return next((slot for slot in self._slots if slot.group is group), None)

    def _free(self) -> Slot | None:
        regular = sum(not slot.passing for slot in self._slots)
        if regular < _SLOTS and all(slot.users or slot.group is not None for slot in self._slots):
            self._slots.append(Slot(self._transport, self._nbytes))
        free = [slot for slot in self._slots if not slot.users and not slot.passing]
        return min(free, key=lambda slot: (slot.group is not None, slot.used), default=None)

    def _extra(self) -> Slot:
        """One more buffer, for as long as more groups compute at once than there are buffers."""
        self.passing_slots += 1
        slot = Slot(self._transport, self._nbytes, passing=True)
        self._slots.append(slot)
        return slot

    def _drop_if_passing(self, slot: Slot) -> None:
        if slot.passing and not slot.users and slot in self._slots:
            self._slots.remove(slot)

    def _assign(self, route: Route, group: Group, slot: Slot) -> Slot:
        slot.clear()
        slot.group = group
        self._clock += 1
        slot.used = self._clock
        route.moved_bytes += group.nbytes
        route.moves += 1
        count_moved(route.component, group.nbytes)
        slot.filling = self._submit(slot, group)
        return slot

    def _submit(self, slot: Slot, group: Group) -> Future[None]:
        return self._worker.submit(self._transport.fill, slot, group)
