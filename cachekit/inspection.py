"""What discovery finds in a denoiser: block stacks, attention, and which strategies can attach.

Denoisers are built on the meta device from their configuration, so that no weights are read or allocated.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from torch import nn

from cachekit.api import cached
from cachekit.engine.discovery import (
    find_attention,
    find_block_lists,
    find_denoisers,
    find_unet,
    is_denoiser,
    latent_names,
    timestep_names,
)
from cachekit.errors import CacheKitError
from cachekit.strategies import CacheConfig, strategy_named, strategy_names
from cachekit.zoo.pipelines import entry
from cachekit.zoo.pipelines import names as zoo_names


@dataclasses.dataclass(frozen=True)
class StackReport:
    """A list of blocks: path in the denoiser and number of blocks of each class."""

    name: str
    blocks: int
    classes: dict[str, int]


@dataclasses.dataclass(frozen=True)
class StrategyReport:
    """Whether a strategy can attach.

    Attributes:
        name: strategy, with the site where it has several.
        site: what would be hooked; empty when nothing can be.
        reason: why it cannot attach; empty when it can.
    """

    name: str
    site: str = ""
    reason: str = ""

    @property
    def attaches(self) -> bool:
        return not self.reason


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What discovery found in one denoiser.

    Attributes:
        name: component name; empty for a class on its own.
        model: class of the denoiser.
        parameters: number of parameters.
        latents, timesteps: names of the arguments that carry noisy latents, and that say where the run is.
        stacks: the lists of blocks.
        unet: number of blocks down, middle and up; None for other models.
        attention: number of attention modules.
        strategies: what each strategy would do.
    """

    name: str
    model: str
    parameters: int
    latents: tuple[str, ...]
    timesteps: tuple[str, ...]
    stacks: tuple[StackReport, ...]
    unet: dict[str, int] | None
    attention: int
    strategies: tuple[StrategyReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values."""
        return dataclasses.asdict(self)


def inspect_denoiser(module: nn.Module, name: str = "") -> Inspection:
    """Look at one denoiser; it is left as it was."""
    unet = find_unet(module)
    return Inspection(
        name=name,
        model=type(module).__name__,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        latents=latent_names(module),
        timesteps=timestep_names(module),
        stacks=tuple(
            StackReport(item.name, len(item.blocks), dict(Counter(type(block).__name__ for block in item.blocks)))
            for item in (find_block_lists(module) if unet is None else unet.lists())
        ),
        unet=None if unet is None else {item.name: len(item.blocks) for item in unet.lists()},
        attention=len(find_attention(module)),
        strategies=tuple(_try(label, config, module) for label, config in _trials()),
    )


def inspect_target(target: str) -> list[Inspection]:
    """Look at a zoo name, a folder of a pipeline or of a model, or a denoiser class of diffusers.

    Raises:
        ValueError: nothing is known by this name, it holds no denoiser, or a denoiser cannot be built.
    """
    if target in zoo_names():
        denoisers = _from_folder(entry(target).folder)
    elif Path(target).is_dir():
        denoisers = _from_folder(Path(target))
    else:
        denoisers = {"": _from_class(target)}
    return [inspect_denoiser(module, name) for name, module in denoisers.items()]


def _trials() -> list[tuple[str, CacheConfig]]:
    """Every registered strategy with configs that need nothing from the user."""
    return [
        (f"{name} ({variant})" if variant else name, config)
        for name in strategy_names()
        for variant, config in strategy_named(name).example_configs().items()
    ]


def _try(label: str, config: CacheConfig, module: nn.Module) -> StrategyReport:
    try:
        with cached(module, config) as handle:
            (found,) = handle.stats().denoisers.values()
            return StrategyReport(label, site=found.site)
    except CacheKitError as error:
        return StrategyReport(label, reason=str(error))


def _from_folder(folder: Path) -> dict[str, nn.Module]:
    """The denoisers of a pipeline's folder, or the one of a model's folder."""
    index = folder / "model_index.json"
    if not index.is_file():
        config = _read(folder / "config.json", f"{folder} holds neither model_index.json nor config.json")
        return {"": _built(_denoiser_class(str(config.get("_class_name"))), folder)}
    components: dict[str, nn.Module] = {}
    for name, origin in _read(index, "").items():
        if isinstance(origin, list) and len(origin) == 2 and origin[0] == "diffusers":
            cls = getattr(diffusers, str(origin[1]), None)
            if isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin):
                components[name] = _built(cls, folder / name)
    found = find_denoisers(SimpleNamespace(components=components))
    if not found:
        raise ValueError(f"{folder} holds no denoiser of diffusers (a component that takes a timestep)")
    return found


def _read(path: Path, missing: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(missing)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


def _from_class(name: str) -> nn.Module:
    module = _built(_denoiser_class(name), None)
    if not is_denoiser(module):
        raise ValueError(f"{name} is not a denoiser: its forward takes no timestep")
    return module


def _denoiser_class(name: str) -> type[nn.Module]:
    cls = getattr(diffusers, name, None) if name in dir(diffusers) else None
    if isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin):
        return cls
    if isinstance(cls, type) and issubclass(cls, diffusers.DiffusionPipeline):
        raise ValueError(f"{name} is a pipeline class without weights; name its folder, or its denoiser's class")
    models = [known for known in dir(diffusers) if "Transformer" in known or known.endswith("Model")]
    folded = {known.lower(): known for known in (*zoo_names(), *models)}
    near = [folded[match] for match in difflib.get_close_matches(name.lower(), folded, 3)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"try {', '.join(zoo_names())} or FluxTransformer2DModel"
    raise ValueError(f"{name!r} is no zoo pipeline, folder or denoiser class of diffusers; {hint}")


def _built(cls: type[nn.Module], folder: Path | None) -> nn.Module:
    """A model on the meta device, from its folder's configuration or its defaults."""
    source = "its default configuration" if folder is None else str(folder)
    try:
        with torch.device("meta"):
            if folder is None:
                return cls()
            model: nn.Module = cls.from_config(cls.load_config(folder, local_files_only=True))  # type: ignore[attr-defined]
            return model
    except Exception as error:
        hint = "; name a folder that holds its config.json" if folder is None else ""
        detail = " ".join(str(error).split())
        raise ValueError(
            f"{cls.__name__} cannot be built from {source} ({type(error).__name__}: {detail}){hint}"
        ) from error
