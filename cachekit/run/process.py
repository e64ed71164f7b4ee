"""One of the processes that accelerate's launcher starts: `python -m cachekit.run.process JOB DEVICE`."""

from __future__ import annotations

import sys
import traceback
import warnings
from pathlib import Path

from accelerate import PartialState
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

import cachekit
from cachekit.run.errors import RunError
from cachekit.run.job import Job, draw_here

BAD_SETTINGS = 2
"""Exit code for settings that cannot be used."""


def main(job_file: str, kind: str) -> int:
    """Draw this process's share of the pictures; returns the exit code. The launcher learns of an error by a file.

    Args:
        job_file: the job as JSON.
        kind: "cpu" or "cuda".
    """
    errors = get_error_handler()
    errors.initialize()
    state = PartialState(cpu=kind == "cpu")
    device = "cpu" if kind == "cpu" else str(state.device)
    if state.process_index:
        warnings.simplefilter("ignore", cachekit.CacheWarning)
    try:
        job = Job.from_json(Path(job_file).read_text(encoding="utf-8"))
        with state.split_between_processes(list(job.pictures)) as mine:
            draw_here(job.only(mine), device, lambda text, drawn: None)
    except BaseException as error:
        errors.record_exception(error)
        if not isinstance(error, (RunError, KeyboardInterrupt)):
            traceback.print_exc()
        return BAD_SETTINGS if isinstance(error, RunError) else 1
    finally:
        state.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
