"""`cachekit run`: prompts in, pictures out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import cachekit as ck
from cachekit.run.images import decode

from ..pipelines.tiny import TINY
from .support import invoke, refused, use_tiny_pipeline


def run(out: Path, *arguments: str, code: int = 0) -> Any:
    result = invoke("run", "--out", str(out), "--steps", "6", *arguments)
    assert result.exit_code == code, result.output
    return result


def test_prompts_become_pictures_that_say_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_tiny_pipeline(monkeypatch)
    file = tmp_path / "prompts.txt"
    file.write_text("fox\n\nlion\n", encoding="utf-8")
    out = tmp_path / "deep" / "out"
    options = ("--cache", "taylorseer", "--set", "cache_interval=2", "--guidance", "3", "--seed", "5", "--count", "2")
    result = run(out, str(file), "--prompt", "red heart", "--prompt", "fox", *options)
    pictures = sorted(out.iterdir())
    assert f"written: {out} (6 drawn; " in result.stdout
    assert [path.name.rsplit("-", 1)[0] for path in pictures] == [
        *("fox-5", "fox-6", "lion-5", "lion-6", "red-heart-5", "red-heart-6")
    ]
    found = decode(pictures[-1])
    assert found is not None
    settings, work = found
    assert (settings["prompt"], settings["seed"], settings["steps"]) == ("red heart", 6, 6)
    assert (settings["cache"], settings["fields"]) == ("taylorseer", {"cache_interval": 2})
    assert settings["guidance"] == 3.0
    assert settings["pipeline"]["name"] == "emoji-flux"
    assert 0 < work["computed"] < work["calls"]
    assert work["versions"]["cachekit"] == ck.__version__
    with Image.open(pictures[0]) as image:
        assert image.size == (16, 16)


def test_what_is_there_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_tiny_pipeline(monkeypatch)
    run(tmp_path, "--prompt", "fox", "--prompt", "lion")
    first = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    result = run(tmp_path, "--prompt", "frog", "--prompt", "fox", "--prompt", "lion")
    assert "(1 drawn, 2 there already)" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in first} == first
    result = run(tmp_path, "--prompt", "fox", "--arg", "max_sequence_length=8")
    assert "(1 drawn)" in result.stdout, "other settings, another picture"
    assert len(list(tmp_path.iterdir())) == 4
    next(iter(first)).write_bytes(b"")
    assert "(1 drawn, 1 there already)" in run(tmp_path, "--prompt", "fox", "--prompt", "lion").stdout
    monkeypatch.setattr("cachekit.zoo.load", lambda *_, **__: pytest.fail("nothing is missing"))
    assert "(0 drawn, 2 there already)" in run(tmp_path, "--prompt", "fox", "--prompt", "lion").stdout


def test_pictures_depend_on_prompt_and_seed_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not on what is drawn before them: a rerun or another split over devices gives the same."""
    use_tiny_pipeline(monkeypatch)
    cache = ("--cache", "first_block", "--set", "threshold=0.3")
    run(tmp_path / "a", "--prompt", "fox", "--prompt", "lion", *cache)
    run(tmp_path / "b", "--prompt", "lion", *cache)
    (only,) = (tmp_path / "b").iterdir()
    with Image.open(only) as alone, Image.open(tmp_path / "a" / only.name) as after:
        assert alone.tobytes() == after.tobytes()


def test_a_profile_is_asked_for_a_speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_tiny_pipeline(monkeypatch)
    profile, out = tmp_path / "p.safetensors", tmp_path / "out"
    result = invoke(
        *("calibrate", "emoji-flux", "--out", str(profile), "--steps", "6", "--budgets", "2,3", "--evaluations", "0"),
        *("--held-back", "0.4"),
    )
    assert result.exit_code == 0, result.output
    asked = ("run", "--out", str(out), "--prompt", "fox", "--profile", str(profile), "--speedup")
    assert "3 of 6 denoiser calls" in invoke(*asked, "2").stdout
    assert "2 of 6 denoiser calls" in invoke(*asked, "3").stdout
    assert "there already" in invoke(*asked, "3").stdout
    assert "cannot be drawn" not in refused(*asked, "50")


def test_a_local_folder(tmp_path: Path) -> None:
    tiny = TINY["flux"]
    tiny.build().save_pretrained(tmp_path / "model")
    size = [word for name, value in tiny.sizes[0].items() for word in ("--arg", f"{name}={value}")]
    result = run(tmp_path / "out", "--pipeline", str(tmp_path / "model"), "--prompt", "fox", *size)
    assert "(1 drawn)" in result.stdout
    (path,) = (tmp_path / "out").iterdir()
    assert decode(path)[0]["pipeline"]["name"] == "model"


def test_a_failed_picture_keeps_those_before_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_tiny_pipeline(monkeypatch)
    from cachekit.run.painter import Painter

    paint = Painter.paint

    def failing(self: Painter, picture: Any) -> bytes:
        if picture.prompt == "lion":
            raise RuntimeError("out of memory")
        return paint(self, picture)

    monkeypatch.setattr(Painter, "paint", failing)
    result = invoke("run", "--out", str(tmp_path), "--steps", "2", "--prompt", "fox", "--prompt", "lion")
    assert isinstance(result.exception, RuntimeError)
    assert [path.name[:3] for path in tmp_path.iterdir()] == ["fox"]


def test_bad_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_tiny_pipeline(monkeypatch)
    base = ("run", "--out", str(tmp_path / "out"), "--steps", "4")
    fox = (*base, "--prompt", "fox")
    missing, empty = tmp_path / "missing.txt", tmp_path / "empty.txt"
    empty.write_text("\n")
    assert "nothing to draw" in refused(*base)
    assert "nothing to draw" in refused(*base, "--prompt", " ")
    assert "cannot read prompts" in refused(*base, str(missing))
    assert "holds no prompt" in refused(*base, str(empty))
    assert "neither an embedded pipeline" in refused(*fox, "--pipeline", str(tmp_path))
    assert "did you mean" in refused(*fox, "--cache", "firstblock")
    assert "treshold" in refused(*fox, "--cache", "first_block", "--set", "treshold=0.1")
    assert "--set takes name=value" in refused(*fox, "--cache", "first_block", "--set", "0.1")
    assert "--cache" in refused(*fox, "--set", "threshold=0.1")
    assert "--profile FILE" in refused(*fox, "--speedup", "2")
    assert "missing.txt" in refused(*fox, "--profile", str(missing), "--speedup", "2")
    assert "takes no wrong" in refused(*fox, "--arg", "wrong=1")
    assert "cannot be drawn" in refused(*fox, "--arg", "callback_on_step_end_tensor_inputs=[1]")
    assert "unknown device" in refused(*fox, "--device", "gpu")
    assert "got 'gpu'" in refused(*fox, "--devices", "gpu")
    assert "torch sees" in refused(*fox, "--devices", "cuda:99,cuda:98")
    assert "--processes" in refused(*fox, "--devices", "cpu,cpu", "--processes", "2")
    assert "--processes is for the CPU" in refused(*fox, "--device", "cuda", "--processes", "2")
    assert "finite numbers" in refused(*fox, "--guidance", "nan")
    assert "largest seed" in refused(*fox, "--seed", str(2**32 - 1), "--count", "2")
    assert not list((tmp_path / "out").glob("*"))


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_tiny_pipeline(monkeypatch)
    file = tmp_path / "file"
    file.write_text("")
    assert "cannot write to" in refused("run", "--out", str(file), "--prompt", "fox")
    assert "--out" in refused("run", "--prompt", "fox")


def test_several_processes_from_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which devices a run goes to; `tests/run/test_launch.py` starts the processes."""
    from cachekit.run import ProcessDiedError

    asked: list[tuple[str, ...]] = []

    def draw_on(job: Any, devices: tuple[str, ...], advance: Any) -> None:
        asked.append(devices)
        raise ProcessDiedError("the process on cpu died: Signal 9")

    monkeypatch.setattr("cachekit.run.launch.draw_on", draw_on)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    for options in (("--devices", "cuda:2,cuda:0"), ("--devices", "cpu,cpu"), ("--processes", "3")):
        result = run(tmp_path, "--prompt", "fox", *options, code=1)
        assert "the process on cpu died: Signal 9; 0 of 1 pictures are in" in result.stderr
        assert "run it again" in result.stderr
    assert asked == [("cuda:2", "cuda:0"), ("cpu", "cpu"), ("cpu", "cpu", "cpu")]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--ray"], ["--ray", ""]),
        (["--ray", "--steps", "2"], ["--ray", "", "--steps", "2"]),
        (["--ray", "prompts.txt"], ["--ray", "", "prompts.txt"]),
        (["--ray", "auto", "p.txt"], ["--ray", "auto", "p.txt"]),
        (["--ray", "local"], ["--ray", "local"]),
        (["--ray", "10.0.0.1:6379"], ["--ray", "10.0.0.1:6379"]),
        (["--ray", "ray://head-node:10001", "p.txt"], ["--ray", "ray://head-node:10001", "p.txt"]),
        (["--ray", "[::1]:6379"], ["--ray", "[::1]:6379"]),
        (["--ray=10.0.0.1:6379"], ["--ray=10.0.0.1:6379"]),
    ],
)
def test_the_address_of_a_cluster_may_be_left_out(given: list[str], expected: list[str]) -> None:
    from cachekit.cli.run import with_address

    assert with_address(given) == expected


def test_a_cluster_from_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_tiny_pipeline(monkeypatch)
    asked: list[Any] = []
    monkeypatch.setattr("cachekit.run.on_ray.draw_on_ray", lambda job, *rest: asked.append(rest[:-1]))
    run(tmp_path, "--prompt", "fox", "--ray")
    run(tmp_path, "--prompt", "fox", "--ray", "head:6379", "--device", "cuda")
    run(tmp_path, "--prompt", "fox", "--ray", "local", "--processes", "2")
    assert asked == [(None, "cpu", None), ("head:6379", "cuda", None), ("local", "cpu", 2)]
    base = ("run", "--out", str(tmp_path), "--prompt", "fox", "--ray")
    assert "--devices names cards of this machine" in refused(*base, "--devices", "cuda:0")
    assert "cpu or cuda" in refused(*base, "--device", "mps")
