"""Spreads a job over a Ray cluster: Ray Data's `map_batches`, one actor a device.

Each actor loads the pipeline, and the profile, once. Scheduling, retries and what happens when a node is lost are
Ray's. Pictures come back to this process, which writes them, so that the nodes need no shared folder for results.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cachekit.run.errors import ProcessDiedError, RunError
from cachekit.run.job import Advance, Job
from cachekit.run.settings import Picture, Settings


class Actor:
    """One loaded pipeline on one device of the cluster.

    Args:
        settings: what to draw with; the pipeline's folder has the same path on every node.
        profile: contents of the profile, if there is one.
        kind: "cpu" or "cuda".
    """

    def __init__(self, settings: Settings, profile: bytes | None, kind: str) -> None:
        from cachekit.run.painter import Painter

        self._error = ""
        with tempfile.TemporaryDirectory(prefix="cachekit-run-") as scratch:
            if profile is not None:
                file = Path(scratch, "profile.safetensors")
                file.write_bytes(profile)
                settings = replace(settings, profile=str(file))
            try:
                # Ray shows an actor its own card only.
                self._painter = Painter(settings, "cuda:0" if kind == "cuda" else "cpu")
            except RunError as error:
                self._error = str(error)  # raised here, Ray would start the actor anew without end

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Draw one picture, given as JSON."""
        (text,) = batch["picture"]
        found: dict[str, Any] = {"number": batch["number"][0], "png": b"", "bad": self._error, "died": ""}
        try:
            if not self._error:
                found["png"] = self._painter.paint(Picture(**json.loads(text)))
        except RunError as error:
            found["bad"] = str(error)
        except Exception as error:
            found["died"] = f"{type(error).__name__}: {error}"
        return {name: [value] for name, value in found.items()}


def draw_on_ray(job: Job, address: str | None, kind: str, actors: int | None, advance: Advance) -> None:
    """Draw everything on a cluster, or on one that is started here for this run.

    Args:
        job: pictures that are not there yet.
        address: of a running cluster; "local" starts one on this machine for this run, and None takes the one that
            `RAY_ADDRESS` or `ray start` tell of, or else does the same.
        kind: "cuda" takes one card for each actor, "cpu" none.
        actors: how many; None for one on every card, or with "cpu" on every node.
        advance: told of finished pictures as they come back.

    Raises:
        RunError: Ray is not installed or not reachable, the cluster has no cards, or the settings cannot be used.
        ProcessDiedError: Ray gave up; what was drawn is there.
    """
    if not job.pictures:
        return
    with _cluster(address) as ray:
        ray.data.DataContext.get_current().enable_progress_bars = False
        profile = None if job.settings.profile is None else Path(job.settings.profile).read_bytes()
        count = min(_places(ray, kind, actors), len(job.pictures))
        advance("loading", 0)
        # Blocks that are there at once: tasks that read them would wait for a processor while actors hold them all.
        rows = [{"number": number, "picture": json.dumps(asdict(each))} for number, each in enumerate(job.pictures)]
        drawn = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            Actor,
            fn_constructor_args=(job.settings, profile, kind),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=count),
            **({"num_gpus": 1} if kind == "cuda" else {"num_cpus": 1}),
        )
        try:
            for row in drawn.iter_rows():
                picture = job.pictures[row["number"]]
                if row["bad"]:
                    raise RunError(row["bad"])
                if row["died"]:
                    raise ProcessDiedError(f"an actor failed at {picture.prompt!r}: {row['died']}")
                job.keep(picture, row["png"])
                advance(picture.prompt, 1)
        except ray.exceptions.RayError as error:
            raise ProcessDiedError(f"Ray gave up: {' '.join(str(error).split())}") from error


@contextmanager
def _cluster(address: str | None) -> Iterator[Any]:
    """Ray, connected; left as it was afterwards."""
    try:
        import ray
        import ray.data
    except ImportError:
        raise RunError("Ray is not installed; pip install 'diffusion-cachekit[ray]'") from None
    ours = not ray.is_initialized()
    if ours:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported that nobody asked for
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = f"at {address}" if address else "on this machine"
            raise RunError(f"Ray cannot be reached {where}: {error}") from None
    log = logging.getLogger("ray.data")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield ray
    finally:
        log.setLevel(level)
        if ours:
            ray.shutdown()


def _places(ray: Any, kind: str, asked: int | None) -> int:
    """Number of actors: as asked for, or one on every card, or on every node. More than fit would wait for ever."""
    resource, name = ("GPU", "cards") if kind == "cuda" else ("CPU", "processors")
    there = int(ray.cluster_resources().get(resource, 0))
    if not there:
        raise RunError(f"the cluster has no {name}; use --device cpu, or start its nodes with --num-gpus")
    if asked is not None and asked > there:
        raise RunError(f"the cluster has {there} {name} for {asked} actors; ask for at most {there} --processes")
    return asked or (there if kind == "cuda" else sum(bool(node["Alive"]) for node in ray.nodes()))
