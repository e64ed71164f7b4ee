"""`offload.load`: pipelines whose weights are never in memory as a whole."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

import offload

from ..pipelines.tiny import TINY


@pytest.mark.parametrize("name", ["flux", "sd15", "sd3", "wan", "qwen-image", "sana", "lumina2", "pixart-sigma"])
def test_loaded_pipelines_give_the_same_output(name: str, tmp_path: Path) -> None:
    if name not in TINY:
        name = next(key for key in TINY if key.startswith(name[:6]))
    tiny = TINY[name]
    tiny.build().save_pretrained(tmp_path)
    try:
        whole = DiffusionPipeline.from_pretrained(tmp_path)
    except Exception as error:
        pytest.skip(f"diffusers itself does not load this tiny pipeline: {error}")
    whole.set_progress_bar_config(disable=True)
    base = tiny.call(whole, steps=2)
    pipe = offload.load(tmp_path, device="cpu")
    pipe.set_progress_bar_config(disable=True)
    assert torch.equal(tiny.call(pipe, steps=2), base)
    offload.disable(pipe)
    assert torch.equal(tiny.call(pipe, steps=2), base)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "flux"
    TINY["flux"].build().save_pretrained(folder)
    return folder


def test_no_block_is_ever_whole_in_memory(saved: Path) -> None:
    pipe = offload.load(saved, device="cpu")
    for name in ("transformer", "text_encoder", "text_encoder_2"):
        blocks = [module for module in getattr(pipe, name).modules() if isinstance(module, nn.ModuleList)]
        parameters = [parameter for block in blocks[:1] for parameter in block.parameters()]
        assert parameters
        assert all(parameter.untyped_storage().nbytes() <= 8 for parameter in parameters)
    handle = offload.active(pipe)
    assert handle is not None
    assert handle.stats().offloaded_bytes > handle.stats().resident_bytes
    assert "transformer" in handle.report


def test_another_dtype_is_converted_as_diffusers_does(saved: Path) -> None:
    tiny = TINY["flux"]
    whole = DiffusionPipeline.from_pretrained(saved, torch_dtype=torch.bfloat16)
    whole.set_progress_bar_config(disable=True)
    pipe = offload.load(saved, device="cpu", torch_dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.transformer.dtype == torch.bfloat16
    assert torch.equal(tiny.call(pipe, steps=2), tiny.call(whole, steps=2))


def test_given_components_and_sharded_files(saved: Path, tmp_path: Path) -> None:
    tiny = TINY["flux"]
    shutil.copytree(saved, tmp_path / "flux")
    shutil.rmtree(tmp_path / "flux" / "transformer")
    tiny.build().transformer.save_pretrained(tmp_path / "flux" / "transformer", max_shard_size="300KB")
    whole = DiffusionPipeline.from_pretrained(tmp_path / "flux", vae=tiny.build().vae)
    whole.set_progress_bar_config(disable=True)
    base = tiny.call(whole, steps=2)
    assert len(list((tmp_path / "flux" / "transformer").glob("*.safetensors"))) > 1
    pipe = offload.load(tmp_path / "flux", device="cpu", vae=tiny.build().vae, options={"folder": tmp_path / "own"})
    pipe.set_progress_bar_config(disable=True)
    assert torch.equal(tiny.call(pipe, steps=2), base)
    assert list((tmp_path / "own").rglob("vae/*.safetensors"))
    offload.disable(pipe)
    assert list((tmp_path / "own").iterdir()) == []
    assert torch.equal(tiny.call(pipe, steps=2), base)


def test_what_cannot_be_loaded_is_said(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(offload.OffloadError, match="no saved pipeline"):
        offload.load(tmp_path)
    with pytest.raises(ValueError, match="leave it out"):
        offload.load(saved, options={"source": str(saved)})
    with pytest.raises(ValueError, match="modes are"):
        offload.load(saved, "fast")
    with pytest.raises(offload.OffloadError, match="variant fp16"):
        offload.load(saved, device="cpu", variant="fp16")
    shutil.copytree(saved, tmp_path / "flux")
    for path in (tmp_path / "flux" / "transformer").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(offload.OffloadError, match="no complete safetensors file"):
        offload.load(tmp_path / "flux", device="cpu")


def test_other_modes_load_first(saved: Path) -> None:
    with pytest.warns(offload.OffloadWarning, match="no accelerator"):
        pipe = offload.load(saved, "group", "cpu")
    assert offload.active(pipe) is None


@pytest.mark.slow
def test_the_benchmark_runs_both_ways_with_equal_outputs(tmp_path: Path) -> None:
    """A small one: 108 MiB of weights in 14 blocks of 4 to 9 MiB."""
    code = (
        "import sys, pathlib; from benchmarks import disk_offload as b; folder = pathlib.Path(sys.argv[1]);"
        "b.build(folder, double=6, single=8, heads=2);"
        "text, passed = b.report(folder, 1, 1); print(text)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "outputs bit-identical: yes" in done.stdout
    assert json.dumps(done.stdout).count("| disk") == 2
