"""The command line: `cachekit demo`, `cachekit inspect`, `cachekit calibrate`, `cachekit tune`, `cachekit run`."""

from cachekit.cli import calibrate, demo, inspect, run, tune
from cachekit.cli.app import app, main

__all__ = ["app", "calibrate", "demo", "inspect", "main", "run", "tune"]
