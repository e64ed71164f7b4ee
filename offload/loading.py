"""`offload.load`: a pipeline whose weights have never been in memory as a whole."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import DiffusionPipeline, ModelMixin
from torch import nn

from offload.errors import OffloadError, warn
from offload.files import Stored
from offload.grouping import group_weights
from offload.handle import Handle, lock, modules_of, remember
from offload.layout import empty_at
from offload.modes import checked, enable
from offload.sources import load as load_stored
from offload.sources import shift_in_file
from offload.streamed import DiskOptions, stored_in, stream_from_files
from offload.target import execution_device

_LIBRARIES = ("diffusers", "transformers")


def load(
    source: str | Path,
    mode: str = "disk",
    device: str | torch.device = "auto",
    *,
    torch_dtype: torch.dtype | None = None,
    variant: str | None = None,
    pipeline_class: type[DiffusionPipeline] = DiffusionPipeline,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> DiffusionPipeline:
    """Load a saved pipeline and offload it. In the mode "disk" at most two blocks are in memory at a time.

    Args:
        source: folder of a saved pipeline, or its name on the Hub. The files are read in every step; keep them there.
        mode: as for `offload.enable`; modes other than "disk" load first and offload then.
        device: as for `offload.enable`.
        torch_dtype: convert the weights to this dtype as they are read; None keeps them as they are stored.
        variant: "fp16" for files such as `model.fp16.safetensors`.
        pipeline_class: the class, where the folder does not name the one that is wanted.
        options: options of the mode.
        **kwargs: for `pipeline_class.from_pretrained`; components that are given are offloaded to a temporary folder.

    Returns:
        The pipeline; `offload.active(pipe)` is its handle.

    Raises:
        OffloadError: the folder is no saved pipeline, or has no safetensors files.
        ValueError: an unknown mode or option.
    """
    chosen = checked(mode, dict(options or {}))
    place = execution_device(device)
    folder = Path(source)
    if not isinstance(chosen, DiskOptions):
        dtype = {} if torch_dtype is None else {"torch_dtype": torch_dtype}
        pipe = pipeline_class.from_pretrained(source, variant=variant, **dtype, **kwargs)
        enable(pipe, mode, device, **dict(options or {}))
        return pipe
    if chosen.source is not None:
        raise ValueError("disk: source: it is the folder that is loaded; leave it out")
    if not folder.is_dir():
        folder = Path(pipeline_class.download(str(source), variant=variant))
    index = _index(folder)
    with lock:
        stored: dict[str, dict[str, Stored]] = {}
        given = dict(kwargs)
        for name in index:
            if name not in kwargs:
                built = _empty_component(folder / name, *index[name], torch_dtype, variant)
                if built is not None:
                    given[name], stored[name] = built
        dtype = {} if torch_dtype is None else {"torch_dtype": torch_dtype}
        pipe = pipeline_class.from_pretrained(folder, variant=variant, **dtype, **given)
        modules = modules_of(pipe)
        work = stream_from_files(modules, place, chosen, {name: stored[name] for name in stored if name in modules})
        remember(pipe, Handle("disk", place, work))
    return pipe


def _index(folder: Path) -> dict[str, tuple[str, str]]:
    """Component -> library and class, from the folder's `model_index.json`."""
    path = folder / "model_index.json"
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        items = [(name, value) for name, value in listed.items() if isinstance(value, list) and len(value) == 2]
    except (OSError, ValueError, AttributeError) as error:
        raise OffloadError(
            f"{folder} is no saved pipeline ({error}); pass a folder that save_pretrained wrote, with model_index.json"
        ) from error
    return {name: (value[0], value[1]) for name, value in items if all(isinstance(part, str) for part in value)}


def _empty_component(
    folder: Path, library: str, class_name: str, dtype: torch.dtype | None, variant: str | None
) -> tuple[nn.Module, dict[str, Stored]] | None:
    """A component without its blocks' weights, and where they lie; None leaves it to diffusers.

    That are tokenizers and schedulers, classes of other libraries, quantised weights, and files whose names are
    translated when they are loaded.
    """
    kind = getattr(importlib.import_module(library), class_name, None) if library in _LIBRARIES else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)) or not (folder / "config.json").is_file():
        return None
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("quantization_config"):
        warn(f"`{folder.name}` is quantised and stays in memory; offload has no way to read parts of it")
        return None
    stored = stored_in(folder, variant)
    module = _build(kind, folder)
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    places: dict[str, Stored] = {}
    for shared in names.values():
        found = next((name for name in shared if name in stored), None)
        parameter = module.get_parameter(shared[0])
        if found is None or stored[found].shape != tuple(parameter.shape):
            warn(
                f"`{folder.name}` is loaded as a whole before its weights go to files again: {shared[0]} of "
                f"{class_name} is not in its files under that name"
            )
            return None
        places.update(dict.fromkeys(shared, stored[found]))
    for shared in names.values():
        place = places[shared[0]]
        wanted = _dtype_for(kind, shared, place.dtype, dtype)
        _replace(module, shared, wanted, shift_in_file(place) if wanted == place.dtype else 0)
    for name, buffer in module.named_buffers():
        if name in stored:
            buffer.data = load_stored(stored[name]).to(buffer.dtype if dtype is None else _like(buffer, dtype))
    for name, parameter in group_weights(module).resident.items():
        parameter.data = load_stored(places[name]).to(parameter.dtype)
    return module.eval(), places


def _build(kind: Any, folder: Path) -> nn.Module:
    with init_empty_weights(include_buffers=False):
        if issubclass(kind, ModelMixin):
            module = kind.from_config(kind.load_config(folder))
        else:
            module = kind(kind.config_class.from_pretrained(folder))
    if hasattr(module, "tie_weights"):
        module.tie_weights()
    return module  # type: ignore[no-any-return]


def _replace(module: nn.Module, names: list[str], dtype: torch.dtype, shift: int) -> None:
    """Put a parameter without storage in the place of one on the meta device, under all of its names."""
    old = module.get_parameter(names[0])
    data = empty_at(shift, (), (), dtype, torch.device("cpu")).zero_().expand(old.shape)
    new = nn.Parameter(data, requires_grad=old.requires_grad and data.is_floating_point())
    for name in names:
        path, _, leaf = name.rpartition(".")
        module.get_submodule(path)._parameters[leaf] = new


def _dtype_for(kind: type[nn.Module], names: list[str], stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    if wanted is None or not stored.is_floating_point:
        return stored
    kept = list(getattr(kind, "_keep_in_fp32_modules_strict", None) or ())
    if issubclass(kind, ModelMixin) or wanted is torch.float16:
        kept += list(getattr(kind, "_keep_in_fp32_modules", None) or ())
    parts = {part for name in names for part in name.split(".")}
    return torch.float32 if parts & set(kept) else wanted


def _like(buffer: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if buffer.is_floating_point() else buffer.dtype
