"""`cachekit demo`: one pipeline drawn uncached and with every cache, side by side, with figures."""

from cachekit.calibration.prompts import spread
from cachekit.demo.grid import draw_grid
from cachekit.demo.methods import Method
from cachekit.demo.runner import SEEDS, Demo, Result, Sample, demo
from cachekit.demo.table import render, to_dict

__all__ = ["SEEDS", "Demo", "Method", "Result", "Sample", "demo", "draw_grid", "render", "spread", "to_dict"]
