"""Presets that combine caches, precision, attention and offload under rules. So far: `recipes.artefacts`."""
