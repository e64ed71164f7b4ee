"""What two processes do in the tests of ranks: each scenario returns what its rank saw, as plain values.

Both run in one pair of processes, since starting them takes most of the time.
"""

from __future__ import annotations

import json
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import cachekit as ck
from cachekit.engine.ranks import Ranks
from tests.pipelines.families import flux
from tests.toys import Stack, bare_loop, latents, of_time, pattern, reasons, toy_pipeline

WORLD = 2
STEPS = 8
SCENARIOS: dict[str, Callable[[int], dict[str, Any]]] = {}


def scenario(function: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    SCENARIOS[function.__name__] = function
    return function


def work(rank: int, folder: str) -> None:
    """Run every scenario in this rank and write down what it returned, or how it failed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ck.CacheWarning)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    found: dict[str, Any] = {}
    for name, function in SCENARIOS.items():
        try:
            found[name] = function(rank)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
            break
        dist.barrier()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


class Meeting:
    """A residual whose blocks wait for one another across ranks, as attention over spread tokens does."""

    def __init__(self, of_rank: Callable[[Tensor], Tensor]) -> None:
        self.of_rank, self.meetings = of_rank, 0

    def __call__(self, hidden_states: Tensor, temb: Tensor) -> Tensor:
        self.meetings += 1
        total = hidden_states.mean()
        dist.all_reduce(total)
        return torch.ones_like(hidden_states) * self.of_rank(temb) + 0 * total


class Watch:
    """What `Ranks.agree` was told here, and what came out."""

    def __init__(self) -> None:
        self.local: list[float | None] = []
        self.agreed: list[float] = []

    def __enter__(self) -> Watch:
        original = Ranks.agree

        def agree(ranks: Ranks, computes: bool, score: Tensor | None, *rest: Any) -> tuple[bool, float]:
            self.local.append(None if score is None else float(score))
            answer = original(ranks, computes, score, *rest)
            self.agreed.append(answer[1])
            return answer

        self._patch = mock.patch.object(Ranks, "agree", agree)
        self._patch.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._patch.stop()


def spread(rank: int) -> Callable[[Tensor], Tensor]:
    """Residuals that drift at different times on the two ranks."""
    late = lambda t: 1.0 + (t < 3).float() * (3 - t)  # noqa: E731
    early = lambda t: 1.0 + (t > 5).float() * (t - 5)  # noqa: E731
    return early if rank else late


@scenario
def alone(rank: int) -> dict[str, Any]:
    """What each rank decides on its own part; no block meets the other rank here."""
    model = Stack(4, of_time(spread(rank)))
    with ck.cached(model, "first_block", threshold=0.3):
        bare_loop(model, STEPS)
        return {"pattern": pattern(model), "ranks": ck.stats(model).all[0].ranks}


@scenario
def together(rank: int) -> dict[str, Any]:
    """The same residuals with blocks that hang unless both ranks run them."""
    model = Stack(4, Meeting(spread(rank)))
    with Watch() as watch, ck.cached(model, "first_block", threshold=0.3, group=dist.group.WORLD):
        bare_loop(model, STEPS)
        last = ck.stats(model).last
        return {
            "pattern": pattern(model),
            "local": watch.local,
            "scores": [decision.score for decision in last.decisions],
            "syncs": last.host_syncs,
            "text": str(ck.stats(model)),
        }


@scenario
def nothing_skipped(rank: int) -> dict[str, Any]:
    """Threshold 0 changes no bit."""
    model = Stack(4, Meeting(spread(rank)))
    base = bare_loop(model, STEPS)
    with ck.cached(model, "first_block", threshold=0.0, group=dist.group.WORLD):
        output = bare_loop(model, STEPS)
    return {"equal": all(torch.equal(a, b) for a, b in zip(base, output, strict=True))}


@scenario
def no_number(rank: int) -> dict[str, Any]:
    """NaN in the part of one rank, then infinity in that of the other."""

    def change(t: Tensor) -> Tensor:
        bad = (t == 5) if rank else (t == 2)
        return torch.where(bad, torch.tensor(float("nan") if rank else float("inf")), torch.tensor(0.5))

    model = Stack(4, Meeting(change))
    with ck.cached(model, "first_block", threshold=1e9, group=dist.group.WORLD):
        bare_loop(model, STEPS)
        return {"pattern": pattern(model), "notes": ck.stats(model).last.notes}


@scenario
def one_objects(rank: int) -> dict[str, Any]:
    """Weights are written into on one rank only."""
    model = Stack(4, Meeting(lambda t: torch.tensor(0.5)))

    def write(step: int) -> None:
        if step == 4 and rank:
            with torch.no_grad():
                model.blocks[2].weight.mul_(1.0)

    with ck.cached(model, "first_block", threshold=1e9, group=dist.group.WORLD):
        bare_loop(model, STEPS, at_step=write)
        return {"pattern": pattern(model), "reasons": reasons(model)}


@scenario
def accumulated(rank: int) -> dict[str, Any]:
    """SeaCache adds scores up from call to call: the sums have to stay the same as well."""
    model = Stack(4, Meeting(lambda t: torch.tensor(0.5)))
    x = latents(tokens=4, seed=rank) * (4.0 if rank else 1.0)
    with Watch() as watch, ck.cached(model, "seacache", threshold=0.4, group=dist.group.WORLD):
        bare_loop(model, STEPS, x=x, move=0.5)
        scores = [decision.score for decision in ck.stats(model).last.decisions]
        return {"pattern": pattern(model), "local": watch.local, "scores": scores}


@scenario
def samples(rank: int) -> dict[str, Any]:
    """Samples of a batch decide together here, and that is said."""
    model = Stack(4, Meeting(spread(rank)))
    with ck.cached(model, "first_block", threshold=0.3, per_sample=True, group=dist.group.WORLD):
        bare_loop(model, STEPS, x=latents(batch=2))
        last = ck.stats(model).last
        return {"pattern": pattern(model), "samples": last.samples, "notes": last.notes}


@scenario
def planned(rank: int) -> dict[str, Any]:
    """Gates whose decisions are known ask no other rank."""
    found = {}
    for name, fields in {"taylorseer": {"cache_interval": 3}, "magcache": {"mag_ratios": [1.0, 0.99] * 4}}.items():
        model = Stack(4, of_time(spread(rank)))
        with Watch() as watch, ck.cached(model, name, group=dist.group.WORLD, **fields):
            bare_loop(model, STEPS)
            found[name] = {"asked": len(watch.local), "pattern": pattern(model)}
    return found


@scenario
def own_prompts(rank: int) -> dict[str, Any]:
    """Ranks with different prompts and numbers of steps: no collective is ever entered."""
    pipe = toy_pipeline(change=of_time(spread(rank)))
    refused = mock.Mock(side_effect=AssertionError("a rank with a prompt of its own waited for another"))
    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "barrier", "all_to_all_single")
    found = {}
    with mock.patch.multiple(dist, **dict.fromkeys(names, refused)):
        for config in ("first_block", "seacache"):
            with ck.cached(pipe, config):
                for _ in range(1 + rank):
                    pipe(steps=5 + 4 * rank, x=latents(seed=rank))
                found[config] = {"calls": len(pattern(pipe)), "ranks": ck.stats(pipe).all[0].ranks}
    return {**found, "collectives": refused.call_count}


@scenario
def context_parallel(rank: int) -> dict[str, Any]:
    """A tiny Flux whose tokens diffusers spreads over both ranks.

    `enable_parallelism` asks torch for its accelerator, which a CPU is not; everything behind that runs on CPUs.
    """
    from diffusers import ContextParallelConfig

    torch.manual_seed(0)
    pipe = flux.family()[0].build()

    def draw() -> Tensor:
        return pipe(
            prompt="fox",
            height=32,
            width=16,
            num_inference_steps=STEPS,
            max_sequence_length=8,
            output_type="pt",
            generator=torch.Generator().manual_seed(0),
        ).images

    whole = draw()
    found: dict[str, Any] = {}
    with ck.cached(pipe, "first_block", threshold=0.34):
        before = draw()
        # Enabled before the tokens are spread: the next run notices.
        with (
            mock.patch.object(torch._C, "_get_accelerator", return_value=torch.device("cpu")),
            mock.patch.object(torch.accelerator, "device_count", return_value=1),
        ):
            pipe.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=WORLD))
        with Watch() as watch:
            after = draw()
        found["first_block"] = {
            "pattern": pattern(pipe),
            "local": watch.local,
            "ranks": ck.stats(pipe).all[0].ranks,
            "moved": float((after - before).abs().max()),
        }
    base = draw()
    found["spread"] = float((base - whole).abs().max())
    with ck.cached(pipe, "first_block", threshold=0.0):
        found["never"] = torch.equal(draw(), base)
    for name, fields in {"seacache": {"threshold": 0.3}, "taylorseer": {"cache_interval": 2}}.items():
        with Watch() as watch, ck.cached(pipe, name, **fields):
            image = draw()
            found[name] = {
                "pattern": pattern(pipe),
                "asked": len(watch.local),
                "image": float(image.double().sum()),
            }
    found["restored"] = torch.equal(draw(), base)
    return found


class Wide(nn.Module):
    """A denoiser of residual blocks with linear layers, to shard."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, hidden_states: Tensor, temb: Tensor) -> Tensor:
            return hidden_states + self.down(torch.sin(self.up(hidden_states) + temb / 8))

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, hidden_states: Tensor, timestep: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        for block in self.blocks:
            hidden_states = block(hidden_states, timestep)
        return (hidden_states,)


def _sharded(model: nn.Module, x: Tensor, threshold: float) -> dict[str, Any]:
    with Watch() as watch, ck.cached(model, "first_block", threshold=threshold):
        bare_loop(model, STEPS, x=x)
        stats = ck.stats(model)
        return {"pattern": pattern(model), "ranks": stats.all[0].ranks, "local": watch.local}


@scenario
def tensor_parallel(rank: int) -> dict[str, Any]:
    """Weights spread column by column and row by row; every rank sees all activations."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = Wide()
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, dist.init_device_mesh("cpu", (WORLD,)), plan)
    return _sharded(model, latents(), threshold=0.25)


@scenario
def sharded_weights(rank: int) -> dict[str, Any]:
    """Weights gathered block by block (FSDP2): other prompts, but a block is waited for all the same."""
    from torch.distributed.fsdp import fully_shard

    model, mesh = Wide(), dist.init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _sharded(model, latents(seed=rank) * (1 + 2 * rank), threshold=0.25)
