"""Several processes for real: one is killed, what was drawn is kept, and a rerun draws only the rest."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from cachekit.run import Job, Picture, ProcessDiedError, RunError, Settings, pictures
from cachekit.run.images import decode
from cachekit.run.job import draw_here
from cachekit.run.launch import draw_on

PROMPTS = ["red heart", "fox", "rocket", "lion", "frog", "banana"]
SETTINGS = Settings("emoji-flux", 12, cache="taylorseer", fields={"cache_interval": 3})


def kill_one(folder: Path) -> None:
    """Kill the second process when the first picture is there."""
    while not list(folder.glob("*.png")):
        time.sleep(0.02)
    for process in psutil.Process().children(recursive=True):
        if "cachekit.run.process" in process.cmdline() and process.environ().get("RANK") == "1":
            process.kill()


def draw(job: Job) -> int:
    """Draw on two processes; how many pictures were reported."""
    reported: list[int] = []
    draw_on(job, ("cpu", "cpu"), lambda text, drawn: reported.append(drawn))
    return sum(reported)


@pytest.mark.slow
def test_a_process_that_dies_and_a_rerun(tmp_path: Path) -> None:
    job = Job(SETTINGS, tuple(pictures(SETTINGS, PROMPTS, [0])), tmp_path)
    before = dict(os.environ)
    killer = threading.Thread(target=kill_one, args=(tmp_path,), daemon=True)
    killer.start()
    with pytest.raises(ProcessDiedError, match=r"the process on cpu died: .*SIGKILL"):
        draw(job)
    killer.join()
    assert dict(os.environ) == before
    rest = job.missing()
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert 0 < len(rest.pictures) < len(PROMPTS)
    assert set(kept) == {picture.name for picture in job.pictures if picture not in rest.pictures}, "no half files"
    assert draw(rest) == len(rest.pictures)
    assert not job.missing().pictures
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in kept} == kept, "drawn once only"
    assert {path.name for path in tmp_path.iterdir()} == {picture.name for picture in job.pictures}
    assert all(work["computed"] < work["calls"] for work in job.work())
    _same_as_alone(job, job.pictures[0], tmp_path)


def _same_as_alone(job: Job, picture: Picture, folder: Path) -> None:
    from PIL import Image

    alone = folder / "alone"
    alone.mkdir()
    one = Job(job.settings, (picture,), alone)
    draw_here(one, "cpu", lambda text, drawn: None)
    with Image.open(job.path(picture)) as a, Image.open(one.path(picture)) as b:
        assert a.tobytes() == b.tobytes()
    assert decode(job.path(picture))[0] == decode(one.path(picture))[0]


def _failing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, message: Any, code: int) -> Job:
    """A job whose launcher says that the second process failed."""
    import json

    file = tmp_path / "error.json"
    if message is not None:
        file.write_text(json.dumps({"message": {"message": message, "extraInfo": {"timestamp": "1"}}}))
    failure = ProcessFailure(local_rank=1, pid=7, exitcode=code, error_file=str(file))

    def fail(parsed: Any) -> None:
        raise ChildFailedError("run", {1: failure})

    monkeypatch.setattr("accelerate.commands.launch.launch_command", fail)
    return Job(SETTINGS, tuple(pictures(SETTINGS, PROMPTS[:2], [0])), tmp_path)


def test_settings_that_a_process_cannot_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^'fox' cannot be drawn: bad: height$"):
        draw(_failing(monkeypatch, tmp_path, "RunError: 'fox' cannot be drawn: bad: height", 2))


def test_the_error_of_a_process_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ProcessDiedError, match=r"cpu died: OutOfMemoryError: CUDA out of memory\. Tried$"):
        draw(_failing(monkeypatch, tmp_path, "OutOfMemoryError: CUDA out of memory. Tried", 1))
    (tmp_path / "error.json").unlink()
    with pytest.raises(ProcessDiedError, match="exit code 1"):
        draw(_failing(monkeypatch, tmp_path, None, 1))


def test_an_interrupted_run_ends_as_any_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    job = _failing(monkeypatch, tmp_path, None, 1)

    def interrupt(parsed: Any) -> None:
        raise SignalException("interrupted", 2)  # type: ignore[arg-type]

    monkeypatch.setattr("accelerate.commands.launch.launch_command", interrupt)
    with pytest.raises(KeyboardInterrupt):
        draw(job)


def test_nothing_missing_starts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = _failing(monkeypatch, tmp_path, None, 1)
    assert draw(job.only([])) == 0
