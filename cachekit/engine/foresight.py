"""What runs next: asked by those who fetch weights ahead of their use.

Nothing is decided here and no gate is asked before its time; where a decision is still open the answer is None.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from cachekit.engine.hooks import outlooks

__all__ = ["runs_later", "runs_now"]


def runs_now(modules: Iterable[nn.Module]) -> bool | None:
    """Whether the next call of a module gets to its forward, in the denoiser call in flight in this thread.

    Args:
        modules: the module and those that it lies in, without the denoiser itself.

    Returns:
        False when a cache answers in its place, or in that of a module around it; None while that is not decided.
        Modules that no cache watches run.
    """
    return _joint(outlook.now() for module in modules for outlook in outlooks(module))


def runs_later(modules: Iterable[nn.Module]) -> bool | None:
    """Whether a module will get to its forward in a later denoiser call of the run in flight in this thread.

    Args:
        modules: the module and those that it lies in, with the denoiser.

    Returns:
        True when some later call is known to compute it, False when none will, None where that is open.
    """
    return _joint(outlook.later() for module in modules for outlook in outlooks(module))


def _joint(answers: Iterable[bool | None]) -> bool | None:
    found = list(answers)
    return False if False in found else None if None in found else True
