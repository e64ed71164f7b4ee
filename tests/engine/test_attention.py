"""Attention is sorted by what it is fed, whatever it is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cachekit.engine.attention import attention_kinds

from ..attention_toys import Attention, Video
from ..toys import WIDTH, Stack


class Denoiser(nn.Module):
    """Two blocks of one kind in a list."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(), block()])

    def forward(self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        raise NotImplementedError


def kinds(block: Any) -> dict[str, tuple[str, ...]]:
    return attention_kinds(Denoiser(block))


def test_all_three_kinds() -> None:
    assert attention_kinds(Video()) == {
        "spatial": ("blocks.0.one", "blocks.1.one"),
        "temporal": ("blocks.0.temporal", "blocks.1.temporal"),
        "cross": ("blocks.0.two", "blocks.1.two"),
    }


def test_a_model_without_attention_has_no_kinds() -> None:
    assert attention_kinds(Stack(2)) == {}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()


class SameStream(Block):
    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        return self.attn(x, encoder_hidden_states=x)


class NoStream(Block):
    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        return self.attn(x, None)


class OtherStream(Block):
    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        return self.attn(x, text)


class OtherByName(Block):
    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        return self.attn(encoder_hidden_states=text, hidden_states=x)


class Joined(Block):
    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        text = torch.cat([x, text], dim=1)
        return self.attn(x, encoder_hidden_states=text)


class FallsBack(Block):
    def forward(self, x: Tensor, text: Tensor | None = None) -> Tensor:
        text = text if text is not None else x
        return self.attn(x, encoder_hidden_states=text)


class TakenApart(Block):
    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        x, text = self.attn(x, text)
        return x


class Switch(Block):
    looks_away = False

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        return self.attn(x, encoder_hidden_states=text if self.looks_away else None)


class Away(Switch):
    looks_away = True


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        (SameStream, "spatial"),
        (NoStream, "spatial"),
        (OtherStream, "cross"),
        (OtherByName, "cross"),
        (Joined, "spatial"),
        (FallsBack, "spatial"),
        (TakenApart, "spatial"),
        (Switch, "spatial"),
        (Away, "cross"),
    ],
)
def test_how_the_block_calls_it(block: Any, kind: str) -> None:
    assert kinds(block) == {kind: ("blocks.0.attn", "blocks.1.attn")}


class OtherWidth(SameStream):
    """The key projection only fits another stream, whatever the call looks like."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(context=WIDTH * 2)


def test_width_of_the_keys() -> None:
    assert list(kinds(OtherWidth)) == ["cross"]


class TwoQueries(OtherStream):
    """Both streams ask and are asked."""

    def __init__(self) -> None:
        super().__init__()
        self.attn.add_q_proj = self.attn.add_k_proj = nn.Linear(WIDTH, WIDTH)


def test_joint_attention_is_spatial() -> None:
    assert list(kinds(TwoQueries)) == ["spatial"]


def test_norms_are_no_projections() -> None:
    class Normed(OtherStream):
        def __init__(self) -> None:
            super().__init__()
            self.attn.norm_q, self.attn.norm_k = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    assert list(kinds(Normed)) == ["cross"]


@pytest.mark.parametrize(("flag", "kind"), [(True, "cross"), (False, "spatial")])
def test_without_source_the_flag_decides(flag: bool, kind: str) -> None:
    names: dict[str, Any] = {"Block": Block}
    exec("class Unseen(Block):\n    def forward(self, x, text):\n        return self.attn(x, text)", names)

    def build() -> nn.Module:
        block: nn.Module = names["Unseen"]()
        block.attn.is_cross_attention = flag
        return block

    assert list(kinds(build)) == [kind]


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2)
        self.outer = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        x = x + self.inner(x, x, x)[0]
        return x + self.outer(x, text, text)[0]


def test_multihead_attention() -> None:
    assert kinds(Multihead) == {
        "spatial": ("blocks.0.inner", "blocks.1.inner"),
        "cross": ("blocks.0.outer", "blocks.1.outer"),
    }


class Pooled(Denoiser):
    def __init__(self, block: Any) -> None:
        super().__init__(block)
        self.pooler = Attention()


def test_pooling_outside_of_the_blocks_only_counts_where_there_is_nothing_else() -> None:
    assert attention_kinds(Pooled(SameStream)) == {"spatial": ("blocks.0.attn", "blocks.1.attn")}
    assert attention_kinds(Pooled(nn.Identity)) == {"spatial": ("pooler",)}


def test_wrapped_by_compile() -> None:
    model = Video()
    wrapped = torch.compile(model)
    assert attention_kinds(wrapped) == attention_kinds(model)  # type: ignore[arg-type]
