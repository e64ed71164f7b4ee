"""The buffers on the execution device that groups of weights take turns in."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from offload.layout import Group
from offload.sources import Source


class Transport:
    """How weights get from a source into a buffer of one device.

    On an accelerator copies run on a stream of their own. Before a buffer is overwritten that stream waits for the
    computations that read it, and before it is used the computing stream waits for the copy.
    """

    def __init__(self, device: torch.device, source: Source) -> None:
        self.device, self._source = device, source
        self._module = None if device.type == "cpu" else getattr(torch, device.type)
        has_streams = self._module is not None and hasattr(self._module, "Stream")
        self.stream = self._module.Stream(device=device) if self._module is not None and has_streams else None

    def on_stream(self) -> AbstractContextManager[Any]:
        """What runs inside goes to the copying stream, where there is one."""
        return nullcontext() if self._module is None or self.stream is None else self._module.stream(self.stream)

    def event(self) -> Any | None:
        """A new event, where the device has streams."""
        return None if self._module is None or self.stream is None else self._module.Event()

    def current(self) -> Any:
        """The stream that this thread computes on."""
        assert self._module is not None
        return self._module.current_stream(self.device)

    def fill(self, slot: Slot, group: Group) -> None:
        """Put the weights of a group into a slot; on an accelerator the copy may still be under way afterwards."""
        if self.device.type == "cpu":
            self._source.read(group, slot.buffer)
            return
        flat = self._source.flat(group)
        if flat is None:
            flat = slot.staging(group.buffer_bytes)
            self._source.read(group, flat)
        with self.on_stream():
            if slot.released is not None and self.stream is not None:
                self.stream.wait_event(slot.released)
            slot.buffer[: group.buffer_bytes].copy_(flat[: group.buffer_bytes], non_blocking=self.stream is not None)
            slot.ready = self.event()
            if slot.ready is not None:
                slot.ready.record(self.stream)


class Slot:
    """One buffer and what is in it.

    Attributes:
        group: whose weights it holds, or is being filled with.
        filling: finished when the weights are there; carries the error when they could not be read.
        users: calls that compute with it now.
        used: rises with every use; the slot used longest ago is refilled first.
        passing: made for one use, because all others were busy.
    """

    def __init__(self, transport: Transport, nbytes: int, passing: bool = False) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=transport.device)
        self.group: Group | None = None
        self.filling: Future[None] | None = None
        self.users, self.used, self.passing = 0, 0, passing
        self.ready: Any | None = None
        self.released: Any | None = None
        self._transport = transport
        self._staging: torch.Tensor | None = None

    def staging(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory to read files into; free to be written when this returns."""
        if self.ready is not None:
            self.ready.synchronize()
        if self._staging is None or len(self._staging) < nbytes:
            pin = self._transport.device.type in ("cuda", "xpu")
            self._staging = torch.empty(max(nbytes, len(self.buffer)), dtype=torch.uint8, pin_memory=pin)
        return self._staging

    def await_ready(self) -> None:
        """Let this thread's computing stream wait for the copy."""
        if self.ready is not None:
            self._transport.current().wait_event(self.ready)

    def mark_released(self) -> None:
        """What this thread has given its stream so far is the last that reads the buffer."""
        event = self._transport.event()
        if event is not None:
            event.record(self._transport.current())
            self.released = event

    def clear(self) -> None:
        """Hold nothing that counts."""
        self.group, self.filling = None, None
