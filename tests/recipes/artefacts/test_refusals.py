"""What does not fit is refused with what to do, and nothing is left half-changed."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import cachekit as ck
from recipes import artefacts
from recipes.artefacts import artefact, programs
from recipes.artefacts import manifest as manifests
from recipes.artefacts.manifest import Machine

from ...pipelines.tiny import TINY
from .support import SD, ToyPipeline, arguments, base, built

pytestmark = pytest.mark.xdist_group("artefacts")  # shares built artefacts
Error = artefacts.ArtefactError
TEXT = torch.ones(2, 32, 16)


def rewritten(folder: Path, **fields: Any) -> Path:
    """A saved artefact that says something else about itself."""
    file = built().save(folder / "changed.pt")
    manifests.stamp(file, built().manifest.model_copy(update=fields))
    return file


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.ones(2, 4, 8, 16), 5, TEXT), r"takes sample \(2, 4, 8, 8\) float32, got \(2, 4, 8, 16\)"),
        ((torch.ones(1, 4, 8, 8), 5, TEXT[:1]), "fallback=True"),
        ((torch.ones(2, 4, 8, 8).half(), 5, TEXT), "got .* float16"),
        ((torch.ones(2, 4, 8, 8), torch.tensor(5.0).double(), TEXT), "timestep .* float64"),
        ((torch.ones(2, 4, 8, 8), 5, TEXT, torch.ones(2)), "takes no class_labels"),
        ((torch.ones(2, 4, 8, 8), 5, TEXT, None, None, None, {"scale": 0.5}), "without cross_attention_kwargs.scale"),
        ((torch.ones(2, 4, 8, 8), 5, object()), "encoder_hidden_states is a object"),
    ],
)
def test_calls_that_it_was_not_built_for(inputs: tuple[Any, ...], message: str) -> None:
    pipe = SD.build()
    with artefacts.install(pipe, built()), pytest.raises(Error, match=message):
        pipe.unet(*inputs)


def test_an_argument_that_is_missing() -> None:
    pipe = TINY["sdxl"].build()
    with artefacts.install(pipe, built("sdxl")), pytest.raises(Error, match=r"kwargs\.text_embeds is missing"):
        pipe.unet(torch.ones(2, 4, 8, 8), 5, torch.ones(2, 32, 32))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"torch": "1.13.0"}, "built with torch 1.13.0, this is torch .* Build it again"),
        ({"device": "cuda:63"}, "cuda:63, which is not here"),
        ({"machine": Machine(architecture="z80")}, "architecture z80; build it on this machine"),
        ({"weights": "another"}, "other weights .* other_weights=True"),
        ({"config": {}}, "with another .*build the artefact from this pipeline"),
        ({"denoiser": "UNet1DModel"}, "was built from a UNet1DModel"),
        ({"component": "prior"}, "a component 'prior', which this pipeline has not"),
        ({"output": "os.path"}, "os.path is no result class of diffusers"),
        ({"format": 2}, "written by another version"),
    ],
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings", "ignore:Duplicate name")
def test_files_that_do_not_fit(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = rewritten(tmp_path, **fields)
    pipe = SD.build()
    unet = pipe.unet
    with pytest.raises(Error, match=message):
        artefacts.install(pipe, file)
    assert pipe.unet is unet


def test_compiled_code_wants_the_very_version(monkeypatch: pytest.MonkeyPatch) -> None:
    described = built().manifest.model_copy(update={"kind": "aot", "torch": "2.13.0"})
    monkeypatch.setattr(torch, "__version__", "2.13.1+cpu")
    with pytest.raises(Error, match=r"compiled against torch 2\.13\.0"):
        manifests.check_here(described, "it")
    manifests.check_here(described.model_copy(update={"kind": "trace"}), "it")


def test_machines() -> None:
    here = Machine(architecture="x86_64", extensions=("avx2", "fma"))
    assert here.lacks(here) is None
    assert here.lacks(Machine(architecture="x86_64", extensions=("avx2",))) is None
    assert here.lacks(Machine(architecture="x86_64", extensions=("avx512f", "fma"))) == "a processor with avx512f"
    assert here.lacks(Machine(architecture="x86_64", accelerator="X (9, 0)")) == "the accelerator X (9, 0)"


def test_files_that_are_no_artefacts(tmp_path: Path) -> None:
    with pytest.raises(Error, match="there is no file"):
        artefacts.load(tmp_path / "absent.pt")
    (tmp_path / "text.pt").write_text("nothing")
    with pytest.raises(Error, match="no artefact"):
        artefacts.load(tmp_path / "text.pt")
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("other/data.txt", "nothing")
    with pytest.raises(Error, match="no artefact"):
        artefacts.describe(tmp_path / "other.pt")
    manifests.stamp(tmp_path / "other.pt", built().manifest)
    with pytest.raises(Error, match="damaged: build it again"):
        artefacts.load(tmp_path / "other.pt")


def test_saving(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"ends in '\.pt'"):
        built().save(tmp_path / "unet.pt2")
    with pytest.raises(Error, match="make it first"):
        built().save(tmp_path / "absent" / "unet.pt")
    file = tmp_path / "unet.pt"
    file.write_text("older")
    assert artefacts.describe(built().save(file)) == built().manifest


def test_a_failed_write_keeps_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "unet.pt"
    file.write_text("older")
    monkeypatch.setattr(manifests, "stamp", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        built().save(file)
    assert file.read_text() == "older"
    assert list(tmp_path.iterdir()) == [file]


def test_the_model_is_fixed() -> None:
    pipe = SD.build()
    with artefacts.install(pipe, built()):
        for change in (lambda: pipe.unet.half(), lambda: pipe.to(torch.float64), lambda: pipe.unet.to("meta")):
            with pytest.raises(Error, match=r"cannot be moved to .* undo the artefact first"):
                change()
        pipe.to("cpu", torch.float32)  # diffusers had cast the components before this one
        with pytest.raises(Error, match=r"set_attn_processor\(\) is not for an artefact"):
            pipe.unet.set_attn_processor(None)
        with pytest.raises(Error, match="load_lora_adapter"):
            pipe.unet.load_lora_adapter({})
        assert torch.equal(SD.call(pipe, steps=3), base()), "and it works on"


def test_installing() -> None:
    pipe = SD.build()
    with pytest.raises(Error, match="at least one"):
        artefacts.install(pipe)
    with artefacts.install(pipe, built()), pytest.raises(Error, match="runs on an artefact already"):
        artefacts.install(pipe, built())
    with ck.cached(pipe, "deepcache"), pytest.raises(Error, match="disable_cache"):
        artefacts.install(pipe, built())
    with pytest.raises(Error, match="do not go together: their component differ"):
        artefacts.install(pipe, built(), built("flux"))
    pipe.unet.conv_in.weight.data.mul_(2)
    with pytest.raises(Error, match="other weights"):
        artefacts.install(pipe, built())
    with artefacts.install(pipe, built(), other_weights=True):
        assert torch.equal(SD.call(pipe, steps=3), base())
    pipe.unet = None
    with pytest.raises(Error, match="needs the denoiser"):
        artefacts.install(pipe, built(), fallback=True)


def test_a_component_replaced_later_is_left_alone() -> None:
    pipe = SD.build()
    installed = artefacts.install(pipe, built())
    pipe.unet = mine = SD.build().unet
    with pytest.raises(Error, match="replaced since"):
        installed.undo()
    assert pipe.unet is mine


def test_undoing_twice() -> None:
    pipe = SD.build()
    unet = pipe.unet
    installed = artefacts.install(pipe, built())
    installed.undo()
    installed.undo()
    assert pipe.unet is unet


def test_building() -> None:
    pipe = SD.build()
    with pytest.raises(Error, match="no kind 'magic'"):
        artefacts.build(pipe, "magic")
    with pytest.raises(Error, match="no denoiser called 'vae'"):
        artefacts.build(pipe, "trace", component="vae")
    with pytest.raises(Error, match="pass component="):
        artefacts.build(TINY["wan-two-experts"].build(), "trace")
    with ck.cached(pipe, "deepcache"), pytest.raises(Error, match="disable_cache"):
        artefacts.build(pipe, "trace", **arguments())
    pipe.unet.train()
    with pytest.raises(Error, match=r"pipe\.unet\.eval\(\)"):
        artefacts.build(pipe, "trace", **arguments())
    pipe.unet.eval().mid_block.compile(backend="eager")
    with pytest.raises(Error, match="compiled already"):
        artefacts.build(pipe, "trace", **arguments())


def test_calls_of_one_run_that_differ() -> None:
    def swap(pipe: Any, index: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds": values["prompt_embeds"][:, :16]}

    with pytest.raises(Error, match="build one artefact for each"):
        artefacts.build(
            SD.build(),
            "trace",
            callback_on_step_end=swap,
            callback_on_step_end_tensor_inputs=["prompt_embeds"],
            **arguments(),
        )


@pytest.mark.parametrize(("kind", "message"), [("trace", "gives other results"), ("export", "cannot be turned")])
def test_decisions_in_python_are_found(kind: str, message: str) -> None:
    with pytest.raises(Error, match=f"{message}.*torch.compile"):
        artefacts.build(ToyPipeline(decides=True), kind)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (programs, artefact):
        monkeypatch.setattr(module, "can_compile", lambda: False)
    with pytest.raises(Error, match=r"no C\+\+ compiler; pass kind='export'"):
        artefacts.build(ToyPipeline(), "aot")
    assert artefacts.build(ToyPipeline()).manifest.kind == "trace"


def test_a_torch_without_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(programs.torch.jit, "trace")
    with pytest.raises(Error, match="pass kind='export'"):
        artefacts.build(ToyPipeline(), "trace")
