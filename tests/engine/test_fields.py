"""Latents as fields: axes, packed tokens, lists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cachekit.engine.discovery import latent_names
from cachekit.engine.fields import Channels, latent_fields

from ..conformance.cases import cases

ALL = {case.name: case for case in cases()}

# Where frames, rows and columns lie in a few structurally different denoisers, at a batch of two where it is possible.
SHAPES = {
    "sd3": [[(2, 4, 8, 8)]],
    "unet-2d-condition": [[(2, 4, 8, 8)]],
    "wan-t2v": [[(2, 4, 2, 4, 8)]],
    "wan-i2v": [[(2, 8, 2, 4, 8)]],
    "cogvideox": [[(2, 4, 2, 4, 8)]],
    "anyflow": [[(2, 4, 2, 4, 8)]],
    "unet-spatio-temporal": [[(2, 8, 3, 8, 8)]],
    "kandinsky5": [[(2, 4, 2, 4, 8)]],
    "kandinsky5-visual-condition": [[(2, 9, 2, 4, 8)]],
    "joyimage-edit": [[(2, 4, 1, 8, 8)] * 2],
    "joyimage-edit-plus": [[(2, 16, 1, 4, 4), (2, 16, 1, 2, 2)]],
    "flux": [[(2, 4, 4, 4)]],
    "flux-kontext": [[(2, 4, 4, 4), (2, 4, 2, 4)]],
    "krea2": [[(2, 4, 4, 4)]],
    "qwen-image": [[(2, 4, 1, 4, 4)]],
    "qwen-image-edit": [[(2, 4, 1, 4, 4), (2, 4, 1, 2, 4)]],
    "nucleus-moe": [[(2, 4, 1, 4, 4)]],
    "ltx2": [[(2, 4, 2, 2, 4), (2, 4, 6)]],
    "stable-audio": [[(2, 4, 8)]],
    "longcat-audio": [[(2, 4, 8)]],
    "unet-1d": [[(2, 4, 32)]],
    "rfd4-proteina": [[(2, 3, 8), (2, 4, 8)]],
    "prior": [[(2, 12)]],
    "z-image": [[(1, 4, 1, 8, 8)], [(1, 4, 1, 8, 8)]],
    "z-image-omni": [[(1, 4, 1, 8, 8)] * 2],
    "wan-animate-2": [[(1, 4, 3, 4, 8)]],
    "cosmos3": [[(1, 4, 2, 4, 4)]],
}


def found(arguments: dict[str, Any], fetches: list[Tensor] | None = None) -> Any:
    def fetch(tensor: Tensor) -> Any:
        if fetches is not None:
            fetches.append(tensor)
        return tensor.tolist()

    return latent_fields(arguments, ("hidden_states",), Channels(), {}, fetch)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    case = ALL[name]
    model = case.build()
    arguments = case.inputs(0, batch=2 if case.supports_batch else 1)
    fields = latent_fields(arguments, latent_names(model), Channels.of(model), {}, torch.Tensor.tolist)
    assert [[tuple(field.shape) for field in group] for group in fields] == SHAPES[name]


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_every_latent_is_in_a_field(case: Any) -> None:
    """Nothing is left out but padding, and nothing comes twice."""
    arguments = case.inputs(0)
    model = SimpleNamespace(config=case.config)
    names = latent_names(case.cls.__new__(case.cls))
    fields = latent_fields(arguments, names, Channels.of(model), {}, torch.Tensor.tolist)
    total = sum(field.numel() for group in fields for field in group)
    given = sum(tensor.numel() for name in names for tensor in tensors(arguments.get(name)))
    padding = 2 * 16 if case.name == "joyimage-edit-plus" else 0
    assert total == given - padding


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value or () for tensor in tensors(item)] if isinstance(value, (list, tuple)) else []


def grid(height: int, width: int) -> Tensor:
    return torch.cartesian_prod(torch.zeros(1), torch.arange(height).float(), torch.arange(width).float())


def test_tokens_are_unpacked_to_their_places() -> None:
    tokens = torch.randn(2, 12, 5)
    ((field,),) = found({"hidden_states": tokens, "img_ids": grid(3, 4)})
    assert torch.equal(field, tokens.movedim(-1, 1).reshape(2, 5, 3, 4))


def test_tokens_in_another_order() -> None:
    tokens, order = torch.randn(1, 12, 5), torch.randperm(12, generator=torch.Generator().manual_seed(0))
    ((field,),) = found({"hidden_states": tokens[:, order], "img_ids": grid(3, 4)[order]})
    assert torch.equal(field, tokens.movedim(-1, 1).reshape(1, 5, 3, 4))


def test_padding_repeats_a_position() -> None:
    ids = torch.cat([grid(3, 3), torch.zeros(3, 3)])
    ((field,),) = found({"hidden_states": torch.randn(1, 12, 5), "img_ids": ids})
    assert field.shape == (1, 5, 3, 3)


def test_ids_of_other_tokens_come_first() -> None:
    text = torch.arange(4.0)[:, None].expand(4, 3)
    ((field,),) = found({"hidden_states": torch.randn(1, 6, 5), "position_ids": torch.cat([text, grid(2, 3)])})
    assert field.shape == (1, 5, 2, 3)


def test_position_ids_may_count_frames() -> None:
    ids = torch.cartesian_prod(torch.arange(2.0), torch.arange(3.0), torch.arange(4.0))
    video = {"hidden_states": torch.randn(1, 24, 5), "position_ids": ids[None]}
    assert found(video)[0][0].shape == (1, 5, 2, 3, 4)
    images = {"hidden_states": torch.randn(1, 24, 5), "img_ids": ids}
    assert [field.shape for field in found(images)[0]] == [(1, 5, 3, 4)] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"img_ids": torch.randn(12, 3)},
        {"img_ids": grid(3, 3)},
        {"img_ids": "no tensor"},
        {"img_shapes": [[(1, 2, 3)], [(1, 3, 2)]]},
        {"img_shapes": [(1, 40, 40)]},
        {"num_frames": 2, "height": 3, "width": 3},
        {"masks": [torch.ones(2), torch.ones(3)]},
    ],
    ids=["nothing", "no grid", "too few ids", "text", "samples differ", "too large", "other size", "tensors"],
)
def test_a_line_of_tokens_where_nothing_tells(arguments: dict[str, Any]) -> None:
    ((field,),) = found({"hidden_states": torch.randn(2, 12, 5), **arguments})
    assert field.shape == (2, 5, 12)


def test_sizes_unpack_without_reading_back() -> None:
    fetches: list[Tensor] = []
    sizes = {"num_frames": 2, "height": 2, "width": 3, "img_ids": grid(3, 4)}
    ((field,),) = found({"hidden_states": torch.randn(2, 12, 5), **sizes}, fetches=fetches)
    assert field.shape == (2, 5, 2, 2, 3)
    assert not fetches


def test_a_known_plan_is_not_read_again() -> None:
    fetches: list[Tensor] = []
    arguments = {"hidden_states": torch.randn(2, 12, 5), "img_ids": grid(3, 4)}
    plans: dict[str, Any] = {}
    for _ in range(3):
        latent_fields(
            arguments, ("hidden_states",), Channels(), plans, lambda ids: (fetches.append(ids), ids.tolist())[1]
        )
    assert len(fetches) == 1


@pytest.mark.parametrize(
    ("shape", "config", "axis"),
    [
        ((1, 4, 8, 8), {}, 1),
        ((1, 8, 8, 4), {"in_channels": 4}, 3),
        ((1, 3, 4, 8, 8), {"in_channels": 4}, 2),
        ((1, 3, 4, 8, 8), {}, 1),
        ((1, 3, 8, 8, 33), {"in_visual_dim": 16}, 4),
        ((1, 64, 64), {"in_channels": 64}, 2),
        ((1, 64, 9), {"in_channels": 64}, 1),
        ((1, 64, 9), {"in_channels": True, "out_channels": None}, 2),
    ],
)
def test_the_axis_of_the_channels(shape: tuple[int, ...], config: dict[str, Any], axis: int) -> None:
    assert Channels.of(SimpleNamespace(config=config)).axis(shape) == axis


@pytest.mark.parametrize("value", [None, torch.zeros(2, 0, 4), torch.ones(2, 3, dtype=torch.long), [], [None], "text"])
def test_no_latents(value: Any) -> None:
    assert found({"hidden_states": value}) == ()
