"""Finds denoisers in a pipeline, and block stacks, attention modules and UNet halves in a denoiser, by structure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from diffusers.models.attention import AttentionModuleMixin
from torch import nn

from cachekit.engine.binding import parameter_names

_TIME_LIKE = re.compile(r"t|r|sigmas?|noise_level|timestep_ratio|(.*_)?timesteps?|timestep_r|(.*_)?time")
_NOT_DENOISERS = ("controlnet", "vae", "text_encoder", "image_encoder", "adapter", "vocoder", "safety_checker")
_FOREIGN_HOMES = (".controlnets", ".autoencoders", "transformers.models", ".adapter")
_CONTROL_HOME = ".controlnets"
_LATENTS = ("hidden_states", "sample", "x", "latents")
_TORCH_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
QUERY_LIKE = re.compile(r"(.*_)?(to_)?(q|qkv|query|wq)(_proj|_linear)?")


@dataclass(frozen=True)
class BlockList:
    """A list of blocks: `name` is its path in the denoiser, `blocks` its modules in order."""

    name: str
    blocks: tuple[nn.Module, ...]


@dataclass(frozen=True)
class UNetParts:
    """The halves of a UNet; `middle` is None where there is no middle block."""

    down: BlockList
    middle: nn.Module | None
    up: BlockList

    def lists(self) -> list[BlockList]:
        """The parts in the order in which they run."""
        middle = [] if self.middle is None else [BlockList("mid_block", (self.middle,))]
        return [self.down, *middle, self.up]


def find_denoisers(target: Any) -> dict[str, nn.Module]:
    """Name -> denoiser. A module is taken as it is, named ""; a pipeline is searched in its components."""
    if isinstance(target, nn.Module):
        return {"": target}
    components = getattr(target, "components", None)
    if not isinstance(components, dict):
        raise TypeError(
            f"expected a DiffusionPipeline, a ModularPipeline or a denoiser module, got {type(target).__name__}"
        )
    return {
        name: module
        for name, module in components.items()
        if isinstance(module, nn.Module) and not name.startswith(_NOT_DENOISERS) and is_denoiser(unwrap(module))
    }


def is_denoiser(module: nn.Module) -> bool:
    """A denoiser takes a timestep (or noise level) and is no control network, text encoder or autoencoder.

    A UNet that has its control network inside (ControlNet-XS) is a denoiser: it has an up path.
    """
    home = type(module).__module__
    foreign = any(part in home for part in _FOREIGN_HOMES)
    return takes_timestep(module) and (not foreign or (_CONTROL_HOME in home and find_unet(module) is not None))


def find_control_networks(pipeline: Any) -> list[nn.Module]:
    """The components that are called beside the denoiser, with a timestep, and return hints for it.

    Those that take no timestep (T2I-Adapter) run once before the loop; their hints are arguments that stay equal.
    """
    components = getattr(pipeline, "components", None)
    found = components.items() if isinstance(components, dict) else ()
    return [module for name, module in found if isinstance(module, nn.Module) and _is_control(name, unwrap(module))]


def _is_control(name: str, module: nn.Module) -> bool:
    named = name.startswith("controlnet") or _CONTROL_HOME in type(module).__module__
    return named and takes_timestep(module) and find_unet(module) is None


def takes_timestep(module: nn.Module) -> bool:
    """True when `forward` has a timestep-like parameter."""
    return bool(timestep_names(module))


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside a `torch.compile` wrapper, or the module itself."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


def latent_names(denoiser: nn.Module) -> tuple[str, ...]:
    """Parameters that carry noisy latents: the image or video, and every stream with a time of its own.

    A parameter `audio_timestep` says that `audio_hidden_states` is noisy too.
    """
    names = parameter_names(type(denoiser))
    prefixes = [name.rpartition("_time")[0] for name in timestep_names(denoiser)]
    paired = [
        name
        for name in names
        for prefix in prefixes
        if prefix and name in (prefix, f"{prefix}_tokens", f"{prefix}_hidden_states", f"{prefix}_latents")
    ]
    first = [name for name in names if name in _LATENTS][:1]
    if not first and not paired:
        first = [name for name in names if name.endswith("_tokens")][:1] or list(names[:1])
    return tuple(dict.fromkeys((*first, *paired)))


def timestep_names(denoiser: nn.Module) -> tuple[str, ...]:
    """Parameters that say where the run is."""
    names = parameter_names(type(denoiser))
    return tuple(name for name in names if _TIME_LIKE.fullmatch(name))


def find_block_lists(denoiser: nn.Module) -> list[BlockList]:
    """The outermost lists of blocks, in the order of registration.

    Lists of plain torch layers (norms, linear heads) are no blocks; lists of lists are searched further in. Where no
    `ModuleList` holds blocks, an `nn.Sequential` counts as a list.
    """
    lists = list(_lists_below(denoiser, "", nn.ModuleList))
    return lists or [found for found in _lists_below(denoiser, "", nn.Sequential) if len(found.blocks) > 1]


def find_unet(denoiser: nn.Module) -> UNetParts | None:
    """The halves of a UNet whose up path mirrors its down path, else None."""
    down, up = getattr(denoiser, "down_blocks", None), getattr(denoiser, "up_blocks", None)
    if not isinstance(down, nn.ModuleList) or not isinstance(up, nn.ModuleList) or len(down) != len(up) or len(up) < 2:
        return None
    if any(isinstance(block, nn.ModuleList) for block in (*down, *up)):
        return None
    middle = getattr(denoiser, "mid_block", None)
    return UNetParts(
        BlockList("down_blocks", tuple(down)),
        middle if isinstance(middle, nn.Module) else None,
        BlockList("up_blocks", tuple(up)),
    )


def find_attention(denoiser: nn.Module) -> dict[str, nn.Module]:
    """Path -> the outermost modules that attend: those that project queries, or whose class says so."""
    found: dict[str, nn.Module] = {}
    for name, module in denoiser.named_modules():
        if name and _attends(module) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def _attends(module: nn.Module) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return False
    if isinstance(module, (nn.MultiheadAttention, AttentionModuleMixin)):
        return True
    return any(QUERY_LIKE.fullmatch(name) for name in module._modules)


def _lists_below(
    module: nn.Module, prefix: str, kind: type[nn.ModuleList] | type[nn.Sequential]
) -> Iterator[BlockList]:
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(child, kind):
            blocks = tuple(child)
            if blocks and all(_is_block(block) for block in blocks):
                yield BlockList(path, blocks)
                continue
        yield from _lists_below(child, path, kind)


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    return isinstance(module, _TORCH_BLOCKS) or not type(module).__module__.startswith("torch.nn")
