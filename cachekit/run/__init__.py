"""Draws prompts with a pipeline into a folder: in this process, on several devices, or with Ray."""

from cachekit.run.errors import ProcessDiedError, RunError
from cachekit.run.job import Job
from cachekit.run.settings import Picture, Settings, pictures

__all__ = ["Job", "Picture", "ProcessDiedError", "RunError", "Settings", "pictures"]
