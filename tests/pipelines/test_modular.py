"""A modular pipeline is cached like any other: its loop runs in blocks, its scheduler is a component."""

from __future__ import annotations

import torch

import cachekit as ck

from .tiny import TINY


def test_a_modular_flux_pipeline() -> None:
    from diffusers.modular_pipelines.flux import FluxAutoBlocks

    parts = TINY["flux"].build().components
    pipe = FluxAutoBlocks().init_pipeline()
    pipe.update_components(**{name: part for name, part in parts.items() if part is not None and "image" not in name})

    def call() -> torch.Tensor:
        return pipe(
            prompt="a cat",
            num_inference_steps=8,
            generator=torch.Generator().manual_seed(0),
            height=32,
            width=32,
            max_sequence_length=16,
            output_type="latent",
            output="images",
        )

    plain = call()
    with ck.cached(pipe, ck.TaylorSeerCacheConfig(3)) as handle:
        first, second = call(), call()
        run = handle.stats().last
    assert run is not None
    assert (run.source, run.steps, run.computed_steps()) == ("scheduler", 8, (0, 1, 2, 5))
    assert torch.equal(first, second)
    assert not torch.equal(first, plain)
    assert torch.equal(call(), plain)
