"""`cachekit demo`: one pipeline drawn uncached and with every cache, side by side, with figures."""

from cachekit.calibration.prompts import spread
from cachekit.demo.grid import draw_grid
from cachekit.demo.methods import EVERY, SHORT, Candidate, Method, NotApplicable
from cachekit.demo.runner import SEEDS, Demo, Result, Sample, demo
from cachekit.demo.table import remarks, render, to_dict

__all__ = [
    "EVERY",
    "SEEDS",
    "SHORT",
    "Candidate",
    "Demo",
    "Method",
    "NotApplicable",
    "Result",
    "Sample",
    "demo",
    "draw_grid",
    "remarks",
    "render",
    "spread",
    "to_dict",
]
