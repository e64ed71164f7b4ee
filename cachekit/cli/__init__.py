"""The command line: `cachekit demo`, `cachekit inspect`, `cachekit calibrate`."""

from cachekit.cli import calibrate, demo, inspect
from cachekit.cli.app import app, main

__all__ = ["app", "calibrate", "demo", "inspect", "main"]
