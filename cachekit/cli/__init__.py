"""The command line; a file for each command."""

from cachekit.cli import calibrate, demo, doctor, inspect, run, tune
from cachekit.cli.app import app, main

__all__ = ["app", "calibrate", "demo", "doctor", "inspect", "main", "run", "tune"]
