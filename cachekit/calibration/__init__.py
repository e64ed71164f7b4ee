"""Measure once, use in every later run."""

from cachekit.calibration.magnitudes import MagnitudeRatios, calibrate_magnitudes

__all__ = ["MagnitudeRatios", "calibrate_magnitudes"]
