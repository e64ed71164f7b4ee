"""Machines that are not there: what torch reports is put in its place."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch


@dataclass(frozen=True)
class Machine:
    """What torch reports on a machine."""

    cards: tuple[str, ...] = ()
    hip: str | None = None
    mps: bool = False
    xpu: bool = False

    def pretend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let torch report this machine."""

        def card(device: Any = 0) -> str:
            index = device if isinstance(device, int) else torch.device(device).index or 0
            return self.cards[index]

        monkeypatch.setattr("torch.cuda.is_available", lambda: bool(self.cards))
        monkeypatch.setattr("torch.cuda.device_count", lambda: len(self.cards))
        monkeypatch.setattr("torch.cuda.get_device_name", card)
        monkeypatch.setattr(
            "torch.cuda.get_device_properties",
            lambda device=0: SimpleNamespace(name=card(device), total_memory=24 * 2**30, gcnArchName="gfx1100"),
        )
        monkeypatch.setattr("torch.version.hip", self.hip)
        monkeypatch.setattr("torch.backends.mps.is_available", lambda: self.mps)
        monkeypatch.setattr("torch.backends.mps.get_name", lambda: "Apple M4", raising=False)
        monkeypatch.setattr("torch.mps.recommended_max_memory", lambda: 12 * 2**30)
        monkeypatch.setattr("torch.xpu.is_available", lambda: self.xpu)
        monkeypatch.setattr("torch.xpu.device_count", lambda: int(self.xpu))
        monkeypatch.setattr("torch.xpu.get_device_name", lambda device=0: "Intel Arc B580")


NONE = Machine()
ONE = Machine(cards=("RTX 4090",))
THREE = Machine(cards=("RTX 4090", "RTX 3060", "A100"))
ROCM = Machine(cards=("RX 7900 XTX",), hip="6.4")
MAC = Machine(mps=True)
INTEL = Machine(xpu=True)
