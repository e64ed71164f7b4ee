"""What a reuse hands out may be overwritten by the model's own code; what is kept stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cachekit.engine.clock import View
from cachekit.engine.history import Entry, History, Storage
from cachekit.engine.rules import Predictor
from cachekit.engine.sites import PassContext
from cachekit.strategies.predictors import Reuse, Taylor


@pytest.mark.parametrize("predictor", [Reuse(), Taylor(0), Taylor(1)], ids=repr)
def test_writing_into_a_prediction(predictor: Predictor) -> None:
    history = History(2)
    kept = torch.arange(4.0)
    history.push(Entry(0, {"place": kept}))
    context = PassContext(
        View(0, 1, 9, "scheduler"), "cond", history, predictor, Storage(), _never, {}, (), None, float
    )
    prediction = context.predict("place")
    assert prediction is not None
    assert torch.equal(prediction, kept)
    prediction += 1
    assert torch.equal(kept, torch.arange(4.0))


def _never(signal: Any) -> bool:
    return False
