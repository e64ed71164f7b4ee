"""What the attention modules of a denoiser look at: their own tokens, the same token in other frames, another stream.

An attention crosses when its keys come from another stream than its queries. That shows in the widths of the two
projections, in the flag that diffusers' classes carry, and in how the enclosing block calls it: the block's source is
read for what it passes. Joint attention, which also looks at its own tokens, does not cross.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from cachekit.engine.binding import parameter_names
from cachekit.engine.discovery import QUERY_LIKE, find_attention, unwrap

KINDS = ("spatial", "temporal", "cross")

_CONTEXT = re.compile(r"(.*_)?(encoder_hidden_states|context|cond|embeds|latents|key_value_states|memory|key)")
_KEY_LIKE = re.compile(r"(.*_)?(to_)?(k|kv|key|wk)(_proj|_linear)?")
_FRAMES = re.compile(r"(.*_)?(temporal|temp|motion)(_.*)?")
_FRAMES_ATTENTION = re.compile(r"(.*_)?(time|frames?)(_.*)?")
_FRAMES_CLASS = re.compile(r"(?!.*Spatio).*(Temporal|Motion).*")


def attention_kinds(denoiser: nn.Module) -> dict[str, tuple[str, ...]]:
    """Kind -> paths of the attention modules of that kind, for the kinds that a denoiser has.

    Kinds: "spatial" attends to its own stream (joint attention over image and text included), "temporal" to its own
    stream along the frames, "cross" to another stream. Attention outside of any list of blocks, such as the pooling of
    a prompt, only counts where there is no other.
    """
    core = unwrap(denoiser)
    found = find_attention(core)
    repeated = [path for path in found if any(part.isdigit() for part in path.split("."))]
    kinds: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for path in repeated or found:
        kinds[_kind(core, path, found[path])].append(path)
    return {kind: tuple(paths) for kind, paths in kinds.items() if paths}


def _kind(denoiser: nn.Module, path: str, attention: nn.Module) -> str:
    owners = _owners(denoiser, path)
    parts = [part for part in path.split(".") if not part.isdigit()]
    parent, child = owners[0], parts[-1]
    if _crosses(parent, child, attention):
        return "cross"
    if any(_FRAMES.fullmatch(part) for part in parts) or _FRAMES_ATTENTION.fullmatch(child):
        return "temporal"
    return "temporal" if any(_FRAMES_CLASS.fullmatch(type(owner).__name__) for owner in owners[:2]) else "spatial"


def _owners(denoiser: nn.Module, path: str) -> list[nn.Module]:
    """The modules around one, innermost first, without the containers."""
    owners, module = [denoiser], denoiser
    for part in path.split(".")[:-1]:
        module = module.get_submodule(part)
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            owners.append(module)
    return owners[::-1]


def _crosses(parent: nn.Module, child: str, attention: nn.Module) -> bool:
    queries, keys = _projections(attention, QUERY_LIKE), _projections(attention, _KEY_LIKE)
    flag = getattr(attention, "is_cross_attention", None)
    if len(queries) > 1 or any("qkv" in name for name in queries) or (len(keys) > 1 and not flag):
        return False
    if queries and keys and next(iter(queries.values())) != next(iter(keys.values())):
        return True
    named = "cross" in f"{type(parent).__name__}.{child}".lower()
    if flag is False and not named:
        return False
    block_class: Any = type(parent)
    calls = _calls(block_class).get(child, ())
    if calls:
        return any(_fed_by_another(parent, attention, call) for call in calls)
    return bool(flag) or named or bool(_required_context(type(attention)))


def _projections(attention: nn.Module, pattern: re.Pattern[str]) -> dict[str, int]:
    """Name -> input width of the projections (not the norms) whose name matches."""
    if isinstance(attention, nn.MultiheadAttention):
        return {"": attention.embed_dim if pattern is QUERY_LIKE else attention.kdim}
    named = {name: module for name, module in attention._modules.items() if pattern.fullmatch(name)}
    widths = {name: getattr(module, "in_features", getattr(module, "in_channels", 0)) for name, module in named.items()}
    return {name: width for name, width in widths.items() if width}


def _required_context(attention_class: type[nn.Module]) -> list[str]:
    """Parameters for another stream that a call cannot leave out."""
    parameters = inspect.signature(attention_class.forward).parameters.values()
    required = [item.name for item in parameters if item.default is inspect.Parameter.empty]
    return [name for name in required if _CONTEXT.fullmatch(name)]


@dataclass(frozen=True)
class _Call:
    """A call of a child as it stands in the source of its parent.

    Attributes:
        node: the call.
        taken_apart: it returns several streams.
        sources: variable of the method -> names in what it is joined with or replaced by.
    """

    node: ast.Call
    taken_apart: bool
    sources: Mapping[str, set[str]]


def _fed_by_another(parent: nn.Module, attention: nn.Module, call: _Call) -> bool:
    """Whether a call hands over nothing but another stream to look at, and gets its own one back."""
    if call.taken_apart:
        return False
    names = parameter_names(type(attention))
    arguments = {names[i] if i < len(names) else f"arg{i}": node for i, node in enumerate(call.node.args)}
    arguments.update({item.arg: item.value for item in call.node.keywords if item.arg})
    own = next((node for name, node in arguments.items() if not _CONTEXT.fullmatch(name)), None)
    passed = [_chosen(parent, node) for name, node in arguments.items() if _CONTEXT.fullmatch(name)]
    return any(not _is_none(node) and not _holds(node, own, call.sources) for node in passed)


def _chosen(parent: nn.Module, node: ast.expr) -> ast.expr:
    """`a if self.flag else b` as it comes out for this module."""
    if isinstance(node, ast.IfExp) and isinstance(node.test, ast.Attribute) and hasattr(parent, node.test.attr):
        return node.body if getattr(parent, node.test.attr) else node.orelse
    return node


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _holds(context: ast.expr, own: ast.expr | None, sources: Mapping[str, set[str]]) -> bool:
    """Whether what is looked at is the own stream, is joined with it, or falls back on it."""
    if own is None or not isinstance(context, ast.Name):
        return own is not None and ast.dump(context) == ast.dump(own)
    return bool(({context.id} | sources.get(context.id, set())) & _names_in(own))


@lru_cache(maxsize=1024)
def _calls(owner: type) -> dict[str, tuple[_Call, ...]]:
    """Child name -> the calls of it in the source of a class; empty where there is no source to read."""
    calls: dict[str, list[_Call]] = {}
    for base in owner.__mro__[: owner.__mro__.index(nn.Module)]:
        for call in _calls_in(base):
            target = call.node.func.value if isinstance(call.node.func, ast.Subscript) else call.node.func
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                calls.setdefault(target.attr, []).append(call)
    return {name: tuple(found) for name, found in calls.items()}


def _calls_in(owner: type) -> Iterator[_Call]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    except (OSError, TypeError, SyntaxError):
        return
    for method in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        assignments = [node for node in ast.walk(method) if isinstance(node, ast.Assign)]
        apart = {id(node.value) for node in assignments if isinstance(node.targets[0], ast.Tuple)}
        sources: dict[str, set[str]] = {}
        for assignment in assignments:
            if isinstance(assignment.targets[0], ast.Name):
                for part in _alternatives(assignment.value):
                    sources.setdefault(assignment.targets[0].id, set()).update(_names_in(part))
        for node in ast.walk(method):
            if isinstance(node, ast.Call):
                yield _Call(node, id(node) in apart, sources)


def _alternatives(value: ast.expr) -> list[ast.expr]:
    """What a value is put together from: `a if c else b`, `a or b`, `cat([a, b])`."""
    if isinstance(value, ast.IfExp):
        return [value.body, value.orelse]
    if isinstance(value, ast.BoolOp):
        return value.values
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr.startswith("cat"):
        return value.args[:1]
    return []


def _names_in(node: ast.expr) -> set[str]:
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name) and item.id not in ("self", "torch")}
