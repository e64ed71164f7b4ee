"""A pipeline as the engine sees it: its scheduler's clock and progress bar, shared by all of its denoisers."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from cachekit.engine.clock import SchedulerClock

if TYPE_CHECKING:
    from cachekit.engine.denoiser import DenoiserEngine

_lock = threading.RLock()
_sessions: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()


WHOLE_COMPILE = (
    "torch.compile of the whole model has no effect while its blocks are cached; compile the blocks instead: "
    "model.compile_repeated_blocks()"
)


class Session:
    """One pipeline. Holds it weakly."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = weakref.ref(pipeline)
        self._bar: weakref.ref[Any] | None = None
        self.clock = SchedulerClock()
        self.engines: weakref.WeakSet[DenoiserEngine] = weakref.WeakSet()

    @property
    def pipeline(self) -> Any | None:
        return self._pipeline()

    @property
    def scheduler(self) -> Any | None:
        """The scheduler in use now; users replace it between runs."""
        return getattr(self._pipeline(), "scheduler", None)

    def loop_started(self, bar: Any) -> None:
        """The pipeline has made a progress bar: a loop begins."""
        self._bar = weakref.ref(bar)
        for engine in self.engines:
            current = getattr(self.pipeline, engine.name, None) if engine.name else None
            if getattr(current, "_orig_mod", None) is not None and engine.serves(current):
                engine.say_if_compiled(WHOLE_COMPILE)
            components = getattr(self.pipeline, "components", {}).values()
            if engine.name and not any(engine.serves(component) for component in components):
                engine.say(
                    f"`{engine.name}` of {type(self.pipeline).__name__} was replaced after its cache was enabled; the "
                    f"new one runs uncached. Call disable_cache, then enable_cache on the pipeline again."
                )

    def show(self, text: str) -> None:
        """Write into the postfix of the pipeline's own progress bar."""
        bar = None if self._bar is None else self._bar()
        if bar is not None and hasattr(bar, "set_postfix_str"):
            bar.set_postfix_str(text, refresh=False)


def session_of(pipeline: Any) -> Session:
    """The one session of a pipeline."""
    with _lock:
        session = _sessions.get(pipeline)
        if session is None:
            session = _sessions[pipeline] = Session(pipeline)
        return session


def known_session(pipeline: Any) -> Session | None:
    """The session of a pipeline that has been seen before."""
    return _sessions.get(pipeline)
