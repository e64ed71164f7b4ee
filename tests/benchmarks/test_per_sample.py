"""The arithmetic of `benchmarks.per_sample`; no test asserts a time."""

from __future__ import annotations

import math

import torch

from benchmarks import per_sample
from benchmarks.models import POOLED_WIDTH, TEXT_WIDTH, flux


def test_psnr_of_latents() -> None:
    a = torch.tensor([0.0, 1.0, 2.0, 4.0])
    assert per_sample.latent_psnr(a, a) == math.inf
    assert math.isclose(per_sample.latent_psnr(a + 0.4, a), 20.0, rel_tol=1e-5)


def test_rows_count_the_samples_that_ran() -> None:
    model = flux(2, 1, heads=1)
    still = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def loop(chosen: range) -> torch.Tensor:
        outputs = []
        for step in range(6):
            x = still.clone()
            x[0] = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            count = len(chosen)
            outputs.append(
                model(
                    hidden_states=x[chosen.start : chosen.stop],
                    timestep=torch.full((count,), 1 - 1e-4 * step),
                    encoder_hidden_states=torch.ones(count, 2, TEXT_WIDTH),
                    pooled_projections=torch.ones(count, POOLED_WIDTH),
                    img_ids=torch.zeros(4, 3),
                    txt_ids=torch.zeros(2, 3),
                ).sample
            )
        return torch.stack(outputs, dim=1)

    rows = {row.name: row for row in per_sample.measure(model, loop, 3, 6, 0.1, 1)}
    assert [row.computed for row in rows.values()] == [18, 18, 6 + 2, 6 + 2]
    assert all(row.samples == 18 and len(row.seconds) == 1 for row in rows.values())
    assert min(rows["one for each sample"].to_single) > 100
    assert min(rows["uncached"].to_uncached) == math.inf
    assert len(per_sample.render("title", list(rows.values())).rows) == 4
    assert not model.transformer_blocks[1]._forward_pre_hooks
