"""Pipelines by name or folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cachekit.run.errors import RunError


def folder_of(pipeline: str) -> Path:
    """Where the files of a pipeline are.

    Raises:
        RunError: it is neither the name of an embedded pipeline nor a folder in diffusers' layout.
    """
    from cachekit import zoo
    from cachekit.zoo.pipelines import entry

    if pipeline in zoo.names():
        return entry(pipeline).folder
    if not (Path(pipeline) / "model_index.json").is_file():
        raise RunError(
            f"{pipeline!r} is neither an embedded pipeline ({', '.join(zoo.names())}) nor a folder that holds "
            f"model_index.json"
        )
    return Path(pipeline)


def load(pipeline: str, device: str) -> Any:
    """Load a pipeline from files that are there; without progress bars and log lines.

    Raises:
        RunError: there is none, or it cannot be loaded.
    """
    from cachekit import zoo

    folder = folder_of(pipeline)
    quieten()
    try:
        if pipeline in zoo.names():
            pipe: Any = zoo.load(pipeline, device=device)
        else:
            from diffusers import DiffusionPipeline

            pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True).to(device)
    except (OSError, ValueError, RuntimeError) as error:
        raise RunError(f"the pipeline in {pipeline} cannot be loaded: {error}") from None
    pipe.set_progress_bar_config(disable=True)
    return pipe


def quieten() -> None:
    """Log lines of other libraries would tear the progress bar and the tables apart."""
    import diffusers
    import transformers

    for logging in (diffusers.logging, transformers.logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
