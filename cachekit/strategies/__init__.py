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
from cachekit.strategies.deepcache import DeepCacheConfig
from cachekit.strategies.fastercache import FasterCacheConfig
from cachekit.strategies.first_block import FirstBlockCacheConfig
from cachekit.strategies.magcache import FLUX_MAG_RATIOS, MagCacheConfig
from cachekit.strategies.pab import PyramidAttentionBroadcastConfig
from cachekit.strategies.schedule import ScheduleCacheConfig
from cachekit.strategies.seacache import SeaCacheConfig
from cachekit.strategies.taylorseer import TaylorSeerCacheConfig
from cachekit.strategies.text_kv import TextKVCacheConfig
from cachekit.strategies.tunable import Sources, Tunable

__all__ = [
    "FLUX_MAG_RATIOS",
    "CacheConfig",
    "DeepCacheConfig",
    "FasterCacheConfig",
    "FirstBlockCacheConfig",
    "MagCacheConfig",
    "PyramidAttentionBroadcastConfig",
    "ScheduleCacheConfig",
    "SeaCacheConfig",
    "Sources",
    "Strategy",
    "TaylorSeerCacheConfig",
    "TextKVCacheConfig",
    "Tunable",
    "conflict",
    "find_strategy",
    "strategy",
    "strategy_named",
    "strategy_names",
    "to_config",
]
