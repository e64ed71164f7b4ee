"""Denoisers as graphs: built in one process, saved, and run by a stock pipeline in another."""

from recipes.artefacts.artefact import Artefact, build, describe, load
from recipes.artefacts.errors import ArtefactError, FixedModelError
from recipes.artefacts.install import Installed, install
from recipes.artefacts.manifest import Manifest
from recipes.artefacts.programs import can_compile
from recipes.artefacts.standin import FixedDenoiser
from recipes.artefacts.warning import ArtefactWarning

__all__ = [
    "Artefact",
    "ArtefactError",
    "ArtefactWarning",
    "FixedDenoiser",
    "FixedModelError",
    "Installed",
    "Manifest",
    "build",
    "can_compile",
    "describe",
    "install",
    "load",
]
