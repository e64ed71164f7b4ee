"""Presets that combine caches, precision, attention and offload under rules. Not there yet: the package is empty."""
