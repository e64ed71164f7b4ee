"""The command line: `cachekit demo`, `cachekit inspect`, `cachekit calibrate`, `cachekit tune`."""

from cachekit.cli import calibrate, demo, inspect, tune
from cachekit.cli.app import app, main

__all__ = ["app", "calibrate", "demo", "inspect", "main", "tune"]
