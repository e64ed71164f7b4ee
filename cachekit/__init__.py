"""Caches for diffusers pipelines: reuse work between denoising steps, on any denoiser, with figures."""

from cachekit.api import Handle, cache_context, cached, disable_cache, enable_cache, free, is_cache_enabled, stats
from cachekit.calibration import (
    MagnitudeRatios,
    Profile,
    Recommendation,
    TuneResult,
    calibrate,
    calibrate_magnitudes,
    recommend,
    tune,
)
from cachekit.engine.metadata import TransformerBlockMetadata, TransformerBlockRegistry
from cachekit.engine.stats import Stats
from cachekit.errors import (
    CacheConflictError,
    CacheKitError,
    CacheWarning,
    ConfigError,
    ProfileMismatchError,
    UnsupportedModelError,
)
from cachekit.mixin import CacheMixin
from cachekit.strategies import (
    FLUX_MAG_RATIOS,
    CacheConfig,
    DeepCacheConfig,
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    ScheduleCacheConfig,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
    TextKVCacheConfig,
)

__version__ = "0.1.0"

__all__ = [
    "FLUX_MAG_RATIOS",
    "CacheConfig",
    "CacheConflictError",
    "CacheKitError",
    "CacheMixin",
    "CacheWarning",
    "ConfigError",
    "DeepCacheConfig",
    "FasterCacheConfig",
    "FirstBlockCacheConfig",
    "Handle",
    "MagCacheConfig",
    "MagnitudeRatios",
    "Profile",
    "ProfileMismatchError",
    "PyramidAttentionBroadcastConfig",
    "Recommendation",
    "ScheduleCacheConfig",
    "SeaCacheConfig",
    "Stats",
    "TaylorSeerCacheConfig",
    "TextKVCacheConfig",
    "TransformerBlockMetadata",
    "TransformerBlockRegistry",
    "TuneResult",
    "UnsupportedModelError",
    "__version__",
    "cache_context",
    "cached",
    "calibrate",
    "calibrate_magnitudes",
    "disable_cache",
    "enable_cache",
    "free",
    "is_cache_enabled",
    "recommend",
    "stats",
    "tune",
]
