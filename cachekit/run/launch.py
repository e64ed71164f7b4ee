"""Spreads a job over several devices of this machine with accelerate's launcher: one process a device."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cachekit.run.devices import environment
from cachekit.run.errors import ProcessDiedError, RunError
from cachekit.run.job import Advance, Job
from cachekit.run.process import BAD_SETTINGS

_LOOK_EVERY = 0.5
_NEW_PROCESS = "cachekit.run.process"


def draw_on(job: Job, devices: Sequence[str], advance: Advance) -> None:
    """Draw everything, one process on each device. The processes never talk to each other.

    Args:
        job: pictures that are not there yet.
        devices: from :func:`cachekit.run.devices.device_set`; more than one.
        advance: told of finished pictures as their files appear.

    Raises:
        RunError: the settings cannot be used.
        ProcessDiedError: a process died; the others were ended, and what was drawn is there.
        KeyboardInterrupt: the run was interrupted, or told to end; the processes were ended.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if not job.pictures:
        return
    devices = devices[: len(job.pictures)]
    if len(devices) == 1:
        devices = [*devices, *devices]  # the launcher wants two; the second finds nothing to do
    with tempfile.TemporaryDirectory(prefix="cachekit-run-") as scratch:
        file = Path(scratch, "job.json")
        file.write_text(job.to_json(), encoding="utf-8")
        kind = devices[0].partition(":")[0]
        options = ["--multi_gpu", "--num_processes", str(len(devices)), "--num_machines", "1", "--gpu_ids", "all"]
        options += ["--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no", "--module"]
        parsed = launch_command_parser().parse_args([*options, _NEW_PROCESS, str(file), kind])
        try:
            with _environment(environment(devices)), _watched(job, advance), _quiet():
                launch_command(parsed)
        except SignalException:
            raise KeyboardInterrupt from None
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            kind_of_error, _, message = _message(failure).partition(": ")
            if failure.exitcode == BAD_SETTINGS:
                raise RunError(message) from None
            why = ": ".join(filter(None, (kind_of_error, message)))
            raise ProcessDiedError(f"the process on {devices[rank]} died: {why}") from None


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables; afterwards everything is as it was, what the launcher has set included."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _watched(job: Job, advance: Advance) -> Iterator[None]:
    """Count the files that appear while the launcher has this thread."""
    awaited = {picture.name: (picture, _stamp(job.path(picture))) for picture in job.pictures}
    done = threading.Event()
    advance("loading", 0)

    def look() -> None:
        for name, (picture, before) in list(awaited.items()):
            if _stamp(job.path(picture)) not in (None, before):
                del awaited[name]
                advance(picture.prompt, 1)

    def keep_looking() -> None:
        while not done.wait(_LOOK_EVERY):
            look()

    thread = threading.Thread(target=keep_looking, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        look()


def _message(failure: Any) -> str:
    """What the process wrote down, such as "ValueError: ..."; else what ended it."""
    if isinstance(failure.message, dict):
        return str(failure.message["message"])
    return str(failure.message) if failure.exitcode < 0 else f"exit code {failure.exitcode}; its output tells more"


def _stamp(path: Path) -> tuple[int, int] | None:
    """Tells one file of a name from the next."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


@contextmanager
def _quiet() -> Iterator[None]:
    """The launcher's own log of a death; the error that is raised says it in one line."""
    logger = logging.getLogger("torch.distributed.elastic")
    before, change = logger.level, logger.setLevel
    change(logging.CRITICAL)
    try:
        yield
    finally:
        change(before)
