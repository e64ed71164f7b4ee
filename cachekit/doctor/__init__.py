"""What is installed, what it runs on and whether it works, for a bug report."""

from cachekit.doctor.checks import Check
from cachekit.doctor.packages import Package, Part
from cachekit.doctor.report import Report, examine
from cachekit.doctor.text import render

__all__ = ["Check", "Package", "Part", "Report", "examine", "render"]
