"""The same pipeline with the caches of other projects: diffusers' hooks and cache-dit (extra `peers`)."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import cachekit
from benchmarks.methods import SEA_CACHE, Method


def diffusers_methods(steps: int, ratios: cachekit.MagnitudeRatios) -> list[Method]:
    """diffusers' own hooks; MagCache gets the ratios of the conditional branch, since it takes one list for all."""
    from diffusers.hooks import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig

    curve = list(next(iter(ratios.ratios.values())))

    def method(family: str, setting: str, config: Any) -> Method:
        @contextmanager
        def enable(pipe: Any) -> Iterator[None]:
            pipe.transformer.enable_cache(config)
            try:
                yield
            finally:
                pipe.transformer.disable_cache()

        return Method(f"diffusers {family}", setting, steps, enable, peer=True, project="diffusers")

    found = [
        method("first_block", f"threshold {threshold:g}", FirstBlockCacheConfig(threshold))
        for threshold in (0.1, 0.2, 0.3, 0.5)
    ]
    found += [
        method(
            "magcache",
            f"threshold {threshold:g}",
            MagCacheConfig(
                threshold=threshold, max_skip_steps=skips, num_inference_steps=steps, mag_ratios=torch.tensor(curve)
            ),
        )
        for threshold, skips in ((0.06, 3), (0.12, 4), (0.24, 6), (0.5, 8))
    ]
    found += [
        method(
            "taylorseer" if not lite else "taylorseer lite",
            f"interval {interval}",
            TaylorSeerCacheConfig(
                cache_interval=interval,
                disable_cache_before_step=1,
                taylor_factors_dtype=torch.float32,
                use_lite_mode=lite,
            ),
        )
        for lite in (False, True)
        for interval in (2, 3, 4, 5, 7)
    ]
    found += [_broadcast(steps, skips) for skips in (2, 3, 4, 6)]
    return [*found, *(_sea_cache(steps, *setting) for setting in SEA_CACHE)]


def _broadcast(steps: int, skips: int) -> Method:
    """diffusers' PAB, which has to be told the timestep."""
    from diffusers.hooks import PyramidAttentionBroadcastConfig

    @contextmanager
    def enable(pipe: Any) -> Iterator[None]:
        def timestep() -> Any:
            return pipe.current_timestep

        pipe.transformer.enable_cache(PyramidAttentionBroadcastConfig(skips, current_timestep_callback=timestep))
        try:
            yield
        finally:
            pipe.transformer.disable_cache()

    return Method("diffusers pab", f"range {skips}", steps, enable, peer=True, project="diffusers")


def _sea_cache(steps: int, threshold: float, skips: int) -> Method:
    """diffusers' SeaCache, which has to be told step, sigma and latents; a Flux pipeline tells none of them."""
    from diffusers.hooks import SeaCacheConfig

    def latents(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The packed tokens (1, h * w, 4 C) as (C, 1, 2 h, 2 w)."""
        (tokens,) = kwargs["hidden_states"]
        side = round(tokens.shape[0] ** 0.5)
        planes = tokens.view(side, side, -1, 2, 2).permute(2, 0, 3, 1, 4)
        return [planes.reshape(planes.shape[0], 1, 2 * side, 2 * side)]

    @contextmanager
    def enable(pipe: Any) -> Iterator[None]:
        model, scheduler = pipe.transformer, pipe.scheduler
        context = model.cache_context

        def telling(name: str) -> Any:
            step = scheduler.step_index or 0
            sigma = float(scheduler.sigmas[step])
            return context(name, step_index=step, sigma=sigma, num_inference_steps=steps)

        model.enable_cache(SeaCacheConfig(threshold, max_consecutive_cached=skips, raw_vision_callback=latents))
        model.cache_context = telling
        try:
            yield
        finally:
            del model.cache_context
            model.disable_cache()

    name = f"threshold {threshold:g}, at most {skips}"
    return Method("diffusers seacache", name, steps, enable, peer=True, project="diffusers")


def cache_dit_methods(steps: int) -> list[Method]:
    """cache-dit's DBCache with and without its TaylorSeer; nothing where it is not installed."""
    if importlib.util.find_spec("cache_dit") is None:
        return []

    def method(threshold: float, warmup: int, order: int | None) -> Method:
        @contextmanager
        def enable(pipe: Any) -> Iterator[None]:
            import cache_dit

            logging.disable(logging.INFO)  # it reports every enabling at that level
            config = cache_dit.DBCacheConfig(
                Fn_compute_blocks=1,
                Bn_compute_blocks=0,
                residual_diff_threshold=threshold,
                max_warmup_steps=warmup,
                enable_separate_cfg=True,
            )
            calibrator = None if order is None else cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=order)
            cache_dit.enable_cache(pipe, cache_config=config, calibrator_config=calibrator)
            try:
                yield
            finally:
                cache_dit.disable_cache(pipe)
                logging.disable(logging.NOTSET)

        family = "cache-dit DBCache" if order is None else "cache-dit DBCache + TaylorSeer"
        return Method(family, f"threshold {threshold:g}, warm-up {warmup}", steps, enable, True, "cache-dit")

    return [
        method(threshold, warmup, order)
        for order in (None, 1)
        for threshold, warmup in ((0.08, 3), (0.15, 3), (0.25, 3), (0.35, 2), (0.5, 1), (0.8, 1))
    ]
