"""Measure once, use in every later run."""

from cachekit.calibration.calibrate import calibrate
from cachekit.calibration.front import FrontPoint
from cachekit.calibration.magnitudes import MagnitudeRatios, calibrate_magnitudes
from cachekit.calibration.profile import Profile
from cachekit.calibration.recommend import Recommendation, recommend
from cachekit.calibration.tune import TuneResult, tune

__all__ = [
    "FrontPoint",
    "MagnitudeRatios",
    "Profile",
    "Recommendation",
    "TuneResult",
    "calibrate",
    "calibrate_magnitudes",
    "recommend",
    "tune",
]
