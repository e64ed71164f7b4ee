"""Gradients on several cores without a barrier in every operation.

PyTorch splits each CPU operation over its threads and waits for the slowest one, hundreds of times a step; on a
machine that others use too, that wait dominates. Here each thread takes whole micro-batches from a queue and runs its
operations alone, and they meet once a step. The sum is taken in the order of the micro-batches, so a run can be
repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

Loss = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Maps one micro-batch to (loss to differentiate, detached figures to report)."""


class Microbatches:
    """Runs a loss over micro-batches in a pool of single-threaded workers."""

    def __init__(self, model: torch.nn.Module, workers: int) -> None:
        torch.set_num_threads(1)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))

    def backward(self, loss: Loss, batches: Sequence[tuple[torch.Tensor, ...]]) -> torch.Tensor:
        """Set ``grad`` of every parameter to the mean over equally large micro-batches.

        Returns:
            The mean of the reported figures.
        """

        def work(batch: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
            value, figures = loss(*batch)
            return torch.autograd.grad(value, self._parameters), figures

        results = list(self._pool.map(work, batches))
        for index, parameter in enumerate(self._parameters):
            parameter.grad = torch.stack([gradients[index] for gradients, _ in results]).mean(0)
        return torch.stack([figures for _, figures in results]).mean(0)
