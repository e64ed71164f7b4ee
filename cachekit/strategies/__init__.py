"""One file per strategy: config + gate + predictor. Importing this package registers all of them."""

from cachekit.strategies.base import (
    CacheConfig,
    Strategy,
    find_strategy,
    strategy,
    strategy_named,
    strategy_names,
    to_config,
)
from cachekit.strategies.combination import conflict
from cachekit.strategies.first_block import FirstBlockCacheConfig
from cachekit.strategies.magcache import FLUX_MAG_RATIOS, MagCacheConfig
from cachekit.strategies.schedule import ScheduleCacheConfig
from cachekit.strategies.seacache import SeaCacheConfig
from cachekit.strategies.taylorseer import TaylorSeerCacheConfig

__all__ = [
    "FLUX_MAG_RATIOS",
    "CacheConfig",
    "FirstBlockCacheConfig",
    "MagCacheConfig",
    "ScheduleCacheConfig",
    "SeaCacheConfig",
    "Strategy",
    "TaylorSeerCacheConfig",
    "conflict",
    "find_strategy",
    "strategy",
    "strategy_named",
    "strategy_names",
    "to_config",
]
