"""Measure once, use in every later run."""

from cachekit.calibration.calibrate import calibrate
from cachekit.calibration.front import FrontPoint
from cachekit.calibration.magnitudes import MagnitudeRatios, calibrate_magnitudes
from cachekit.calibration.profile import Profile

__all__ = ["FrontPoint", "MagnitudeRatios", "Profile", "calibrate", "calibrate_magnitudes"]
