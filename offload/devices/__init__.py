"""Which device a run takes, what can be chosen, and the settings that say so."""

from offload.devices.configuration import config_path, load_config, set_config, unset_config
from offload.devices.resolve import Resolution, Rule, decide_device, resolve_device
from offload.devices.settings import LARGEST_SEED, RunSettings

__all__ = [
    "LARGEST_SEED",
    "Resolution",
    "Rule",
    "RunSettings",
    "config_path",
    "decide_device",
    "load_config",
    "resolve_device",
    "set_config",
    "unset_config",
]
