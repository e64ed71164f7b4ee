"""What artefacts and guards say when something did not go as expected; the output is still right."""

from __future__ import annotations

import sys
import warnings


class ArtefactWarning(UserWarning):
    """A call did not fit an artefact and ran on the denoiser itself."""


def warn(message: str) -> None:
    """Issue a warning that points at the first caller outside of the libraries."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, ArtefactWarning, stacklevel=level)


_INSIDE = ("recipes", "offload", "cachekit", "diffusers", "torch", "accelerate", "contextlib")
