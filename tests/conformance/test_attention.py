"""The types that attention is sorted into, against what its projections are really given."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from cachekit.engine.attention import KINDS, attention_kinds

from .cases import cases, run

ALL = {case.name: case for case in cases()}
QUERY, KEY = re.compile(r"(to_)?(q|query)(_proj|_linear)?"), re.compile(r"(to_)?(k|kv|key)(_proj|_linear)?")
# A block of Kandinsky 3 falls back on its own stream; which one it is shows in the widths, which are equal here.
AMBIGUOUS = {"kandinsky3": re.compile(r"(down_blocks\.1|up_blocks\.2)\.attentions\.[12]\.attention")}
TEMPORAL = {"latte", "transformer-temporal", "unet-3d-condition", "i2vgen-xl", "unet-motion", "unet-spatio-temporal"}


@pytest.mark.parametrize("name", ALL)
def test_kinds_are_what_projections_are_fed(name: str) -> None:
    case = ALL[name]
    model = case.build()
    kinds = attention_kinds(model)
    assert list(kinds) == [kind for kind in KINDS if kind in kinds]
    assert ("temporal" in kinds) == (name in TEMPORAL)
    seen: dict[str, dict[str, Tensor]] = {}

    def watch(path: str, role: str, projection: nn.Module) -> None:
        def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.setdefault(path, {}).setdefault(role, args[0].clone())

        projection.register_forward_pre_hook(note)

    for paths in kinds.values():
        for path in paths:
            for child, projection in model.get_submodule(path).named_children():
                for role, pattern in (("query", QUERY), ("key", KEY)):
                    if pattern.fullmatch(child):
                        watch(path, role, projection)
    run(case, model, 1, branches=1)
    for path, fed in seen.items():
        if len(fed) == 2 and not (name in AMBIGUOUS and AMBIGUOUS[name].fullmatch(path)):
            own = torch.equal(fed["query"], fed["key"][..., : fed["query"].shape[-2], :])  # others may follow
            assert own == (path not in kinds.get("cross", ())), path
