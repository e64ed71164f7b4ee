"""Pictures from the actors of a Ray cluster.

Ray is large (some 500 MB installed with what it needs), so it is in an extra of its own, and not among the packages
that the tests need: the tests of a real cluster run where Ray is installed (`pip install -e '.[ray]'`).
"""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from cachekit.run import Job, RunError, Settings, pictures
from cachekit.run.images import decode
from cachekit.run.on_ray import Actor, draw_on_ray

from ..cli.support import invoke, use_tiny_pipeline

HAS_RAY = importlib.util.find_spec("ray") is not None
PROMPTS = ["red heart", "fox", "rocket", "lion", "frog", "banana", "apple", "whale"]
SETTINGS = Settings("emoji-flux", 6, cache="taylorseer", fields={"cache_interval": 2})


def batch_of(settings: Settings, prompt: str = "fox") -> dict[str, Any]:
    """What Ray hands to an actor."""
    return {"number": [3], "picture": [json.dumps(asdict(pictures(settings, [prompt], [0])[0]))]}


def test_an_actor_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_tiny_pipeline(monkeypatch)
    found = Actor(SETTINGS, None, "cpu")(batch_of(SETTINGS))
    assert (found["number"], found["bad"], found["died"]) == ([3], [""], [""])
    path = tmp_path / "fox.png"
    path.write_bytes(found["png"][0])
    settings, work = decode(path)
    assert settings == pictures(SETTINGS, ["fox"], [0])[0].settings
    assert work["computed"] < work["calls"]


def test_an_actor_gets_the_profile_itself_and_not_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_tiny_pipeline(monkeypatch)
    profile = tmp_path / "p.safetensors"
    base = ("calibrate", "emoji-flux", "--out", str(profile), "--steps", "6", "--budgets", "3", "--evaluations", "0")
    assert invoke(*base, "--held-back", "0.4").exit_code == 0
    data, settings = profile.read_bytes(), Settings("emoji-flux", 6, profile=str(profile), speedup=2.0)
    batch = batch_of(settings)
    profile.unlink()
    assert Actor(settings, data, "cpu")(batch)["bad"] == [""]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings("emoji-flux", 6, arguments={"wrong": 1}), "takes no wrong"),
        (Settings("emoji-flux", 6, cache="deepcache"), "UNet"),
        (Settings("emoji-flux", 6, arguments={"callback_on_step_end_tensor_inputs": [1]}), "'fox' cannot be drawn"),
    ],
)
def test_an_actor_says_what_it_cannot_use(settings: Settings, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not fail for it: Ray would start it anew without end."""
    use_tiny_pipeline(monkeypatch)
    actor = Actor(settings, None, "cpu")
    found = actor(batch_of(settings))
    assert found["bad"][0]
    assert message in found["bad"][0]
    assert found["png"] == [b""]


def test_an_actor_says_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_pipeline(monkeypatch)
    actor = Actor(Settings("emoji-flux", 6), None, "cpu")
    monkeypatch.setattr(actor._painter, "paint", lambda picture: 1 / 0)
    found = actor(batch_of(SETTINGS))
    assert found["died"] == ["ZeroDivisionError: division by zero"]
    assert found["bad"] == [""]


def test_nothing_missing_needs_no_cluster(tmp_path: Path) -> None:
    draw_on_ray(Job(SETTINGS, (), tmp_path), "nowhere:1", "cpu", None, lambda text, drawn: None)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    job = Job(SETTINGS, tuple(pictures(SETTINGS, ["fox"], [0])), tmp_path)
    with pytest.raises(RunError, match=r"diffusion-cachekit\[ray\]"):
        draw_on_ray(job, None, "cpu", None, lambda text, drawn: None)


def kill_an_actor(folder: Path, killed: list[int]) -> None:
    """Kill one of our cluster's actors when two pictures are there."""
    while len(list(folder.glob("*.png"))) < 2:
        time.sleep(0.02)
    actors = [child for child in psutil.Process().children(recursive=True) if "MapWorker" in "".join(child.cmdline())]
    actors[0].kill()
    killed.append(len(actors))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed; pip install -e '.[ray]'")
def test_every_picture_once_though_a_worker_is_killed(tmp_path: Path) -> None:
    killed: list[int] = []
    killer = threading.Thread(target=kill_an_actor, args=(tmp_path, killed), daemon=True)
    killer.start()
    options = ("--steps", "6", "--cache", "taylorseer", "--set", "cache_interval=2", "--ray", "local")
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    result = invoke("run", "--out", str(tmp_path), *options, "--processes", "2", *prompts)
    assert result.exit_code == 0, result.output
    killer.join(timeout=1.0)
    assert killed == [2], "both actors were there, and one of them was killed"
    assert f"({len(PROMPTS)} drawn" in result.stdout
    found = [decode(path) for path in tmp_path.iterdir()]
    assert sorted(each[0]["prompt"] for each in found) == sorted(PROMPTS)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed; pip install -e '.[ray]'")
def test_what_a_cluster_cannot_do(tmp_path: Path) -> None:
    import ray

    base = ("run", "--out", str(tmp_path), "--steps", "2", "--prompt", "fox", "--ray")
    ray.init(address="local", num_cpus=1, log_to_driver=False, logging_level="error")
    try:
        assert "no cards" in invoke(*base, "--device", "cuda").stderr
        assert "has 1 processors for 2 actors" in invoke(*base, "--processes", "2").stderr
        result = invoke(*base, "--arg", "wrong=1")
        assert (result.exit_code, result.stderr.count("takes no wrong")) == (2, 1)
        assert not list(tmp_path.iterdir())
    finally:
        ray.shutdown()
