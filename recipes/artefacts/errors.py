"""Exceptions of artefacts. Every message says what to do about it."""

from __future__ import annotations


class ArtefactError(RuntimeError):
    """An artefact cannot be built, or does not fit the pipeline, the inputs, the machine or the installed torch."""


class FixedModelError(ArtefactError, AttributeError):
    """Something was asked of a denoiser that an artefact has not: its graph and its weights are fixed."""
