"""A stock pipeline on an artefact: it draws the same, sees the same denoiser, and gets its own back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from safetensors.torch import load_file

import cachekit as ck
from recipes import artefacts

from ...engine.test_disable_restores import traces
from ...pipelines.tiny import TINY
from .support import SD, STEPS, ToyPipeline, base, built

pytestmark = pytest.mark.xdist_group("artefacts")  # shares built artefacts
SUFFIXES = {"trace": ".pt", "export": ".pt2"}


def saved(folder: Path, kind: str = "trace", name: str = "sd15") -> Path:
    return built(name, kind).save(folder / f"{name}{SUFFIXES[kind]}")


@pytest.mark.parametrize("kind", SUFFIXES)
def test_draws_the_same_and_is_undone(kind: str, tmp_path: Path) -> None:
    file = saved(tmp_path, kind)
    pipe = SD.build()
    unet, before, config = pipe.unet, traces(pipe.unet), dict(pipe.config)
    with artefacts.install(pipe, file):
        assert pipe.unet is not unet
        assert torch.equal(SD.call(pipe, steps=STEPS), base())
    assert pipe.unet is unet
    assert traces(unet) == before
    assert dict(pipe.config) == config
    assert torch.equal(SD.call(pipe, steps=STEPS), base())
    assert [path.name for path in tmp_path.iterdir()] == [file.name], "nothing else is left in the folder"


@pytest.mark.parametrize("name", ["sdxl", "sd15-controlnet", "flux"])
def test_other_denoisers(name: str) -> None:
    tiny = TINY[name]
    artefact = built(name)
    pipe = tiny.build()
    with artefacts.install(pipe, artefact):
        assert torch.equal(tiny.call(pipe, steps=STEPS), base(name))


def test_building_leaves_the_pipeline_alone() -> None:
    pipe = SD.build()
    before, seen = traces(pipe.unet), torch.random.get_rng_state()
    artefacts.build(pipe, "trace", prompt="a cat", height=16, width=16, guidance_scale=1.0)
    assert traces(pipe.unet) == before
    assert torch.equal(torch.random.get_rng_state(), seen)
    assert torch.equal(SD.call(pipe, steps=STEPS), base())


def test_the_pipeline_sees_its_denoiser() -> None:
    pipe = TINY["sdxl"].build()
    unet = pipe.unet
    with artefacts.install(pipe, built("sdxl")):
        assert pipe.unet.config == unet.config
        assert (pipe.unet.dtype, pipe.unet.device) == (unet.dtype, unet.device)
        assert pipe.unet.in_channels == unet.config.in_channels
        assert pipe.unet.add_embedding.linear_1.in_features == unet.add_embedding.linear_1.in_features
        assert not list(pipe.unet.parameters()), "it has no weights that something could move"
        assert not hasattr(pipe.unet, "no_such_thing")
        with pipe.unet.cache_context("cond"):
            pass


def test_both_forms_of_the_result() -> None:
    pipe = SD.build()
    inputs = (torch.ones(2, 4, 8, 8), 5, torch.ones(2, 32, 16))
    with torch.no_grad():
        wanted = pipe.unet(*inputs).sample
    with artefacts.install(pipe, built()):
        named = pipe.unet(*inputs)
        plain = pipe.unet(*inputs, return_dict=False)
    assert isinstance(named, UNet2DConditionOutput)
    assert torch.equal(named.sample, wanted)
    assert isinstance(plain, tuple)
    assert torch.equal(plain[0], wanted)
    assert not plain[0].requires_grad


def test_one_artefact_for_each_kind_of_call() -> None:
    pipe = SD.build()
    with artefacts.install(pipe, built(), built(guidance=False)) as installed:
        assert torch.equal(SD.call(pipe, steps=STEPS), base())
        assert torch.equal(SD.call(pipe, steps=STEPS, guidance=False), base(guidance=False))
        assert len(installed.module.artefacts) == 2


def test_other_calls_fall_back_and_it_is_said_once() -> None:
    pipe = SD.build()
    with artefacts.install(pipe, built(), fallback=True):
        with pytest.warns(artefacts.ArtefactWarning, match="run on the denoiser itself") as said:
            outputs = [SD.call(pipe, steps=STEPS, guidance=False) for _ in range(2)]
        assert torch.equal(SD.call(pipe, steps=STEPS), base())
    assert len([item for item in said if issubclass(item.category, artefacts.ArtefactWarning)]) == 1
    assert all(torch.equal(output, base(guidance=False)) for output in outputs)


def test_a_calibrated_schedule_skips_the_artefact() -> None:
    """The whole denoiser is a place that can be skipped, whatever runs in it; its blocks are none."""
    pipe = SD.build()
    schedule = ck.ScheduleCacheConfig(computed_steps=(0, 1, 3, 5))
    with ck.cached(pipe, schedule):
        cached = SD.call(pipe, steps=6)
    with artefacts.install(pipe, built()):
        with ck.cached(pipe, schedule):
            output = SD.call(pipe, steps=6)
            assert ck.stats(pipe).reused > 0
        torch.testing.assert_close(output, cached)
        with pytest.raises(ck.UnsupportedModelError):
            ck.enable_cache(pipe, ck.FirstBlockCacheConfig(threshold=0.1))


OTHER_PROCESS = """
import sys
from pathlib import Path
from diffusers import StableDiffusionPipeline
from safetensors.torch import save_file
from recipes import artefacts
from tests.recipes.artefacts.support import SD, STEPS
folder = Path(sys.argv[1])
pipe = StableDiffusionPipeline.from_pretrained(folder / "pipe", unet=None, safety_checker=None)
pipe.set_progress_bar_config(disable=True)
before = dict(vars(pipe))
installed = artefacts.install(pipe, folder / "unet.pt")
# The size is left to the pipeline, which reads it from the denoiser's config.
save_file({"latents": SD.call(pipe, steps=STEPS, height=None, width=None).contiguous()}, folder / "out.safetensors")
installed.undo()
assert pipe.unet is None and {**vars(pipe), **before} == vars(pipe)
"""


@pytest.mark.slow
def test_in_a_process_that_never_had_the_denoiser(tmp_path: Path) -> None:
    pipe = SD.build()
    pipe.save_pretrained(tmp_path / "pipe")
    built().save(tmp_path / "unet.pt")
    subprocess.run([sys.executable, "-c", OTHER_PROCESS, str(tmp_path)], check=True, cwd=Path(__file__).parents[3])
    assert torch.equal(load_file(tmp_path / "out.safetensors")["latents"], base())


@pytest.mark.slow
@pytest.mark.skipif(not artefacts.can_compile(), reason="needs a C++ compiler")
def test_compiled_ahead_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs the compiler once; the code itself checks nothing, so that all checks are ours."""
    pipe: Any = ToyPipeline()
    generator = torch.Generator
    wanted = pipe(4, generator().manual_seed(1))
    artefact = artefacts.build(pipe, "aot")
    assert artefact.manifest.machine is not None
    file = artefact.save(tmp_path / "toy.pt2")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with artefacts.install(pipe, file):
        torch.testing.assert_close(pipe(4, generator().manual_seed(1)), wanted, rtol=1e-5, atol=1e-5)
        offset = torch.randn(33)[1:].view(1, 4, 8)
        turned = torch.randn(1, 8, 4).mT
        for odd in (offset, turned):
            given = pipe.transformer(odd, torch.tensor(7.0))[0]
            torch.testing.assert_close(given, pipe.transformer(odd.clone().contiguous(), torch.tensor(7.0))[0])
        with pytest.raises(artefacts.ArtefactError, match="takes hidden_states"):
            pipe.transformer(torch.randn(1, 2, 8), torch.tensor(7.0))
