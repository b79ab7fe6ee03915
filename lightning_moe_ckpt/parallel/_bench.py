"""What the ordered reduction costs beside a plain all-reduce and DistributedDataParallel, on this machine.

Real processes over gloo; the variants take turns within one run, so that what else the machine does hits all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_moe_ckpt.parallel._groups import build_groups
from lightning_moe_ckpt.parallel._hook import OrderedHookState, ordered_hook
from lightning_moe_ckpt.parallel._launcher import run_world
from lightning_moe_ckpt.parallel._ordered import ordered_all_reduce, plain_all_reduce
from lightning_moe_ckpt.parallel._reducer import GradientReducer, ReductionMode

Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReductionCost:
    """Medians of one run at one world size."""

    world_size: int
    nbytes: int
    """Gradient bytes per rank."""
    collective: dict[str, float]
    """Seconds to reduce one flat buffer: `ordered`, `allreduce`."""
    step: dict[str, float]
    """Seconds for forward, backward and reduction: `none` (no reduction), `ordered`, `allreduce`, `ddp`, and
    `ddp+hook` (DDP with `ordered_hook`)."""


def bench_reduction(
    world_sizes: Iterable[int] = (3, 4), *, width: int = 512, depth: int = 16, repeats: int = 15
) -> list[ReductionCost]:
    """Measure every variant at each world size.

    Args:
        world_sizes: numbers of processes, forked one after another.
        width: the model is `depth` square linear layers of this width.
        depth: see `width`.
        repeats: turns of every variant; the first is not counted.
    """
    return [_bench_world(world_size, width, depth, repeats) for world_size in world_sizes]


def _bench_world(world_size: int, width: int, depth: int, repeats: int) -> ReductionCost:
    def work(rank: int) -> tuple[dict[str, float], dict[str, float]]:
        torch.set_num_threads(1)
        group = build_groups().groups["reduce"]
        flat = torch.zeros(-(-width * width * depth // world_size) * world_size)
        scratch = torch.empty_like(flat)
        collectives: dict[str, Step] = {
            "ordered": lambda: _discard(ordered_all_reduce(flat, group, divisor=world_size, scratch=scratch)),
            "allreduce": lambda: _discard(plain_all_reduce(flat, group, divisor=world_size)),
        }
        return _take_turns(collectives, repeats), _take_turns(_steps(width, depth), repeats)

    collective, step = run_world(world_size, work, timeout=timedelta(minutes=5))[0]
    return ReductionCost(world_size=world_size, nbytes=4 * width * width * depth, collective=collective, step=step)


def _steps(width: int, depth: int) -> dict[str, Step]:
    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))

    hooked = DistributedDataParallel(model())
    hooked.register_comm_hook(OrderedHookState(), ordered_hook)
    tokens_TD = torch.randn(8, width)
    return {
        "none": _plain_step(model(), tokens_TD),
        "ordered": _reduced_step(model(), tokens_TD, "ordered"),
        "allreduce": _reduced_step(model(), tokens_TD, "allreduce"),
        "ddp": _plain_step(DistributedDataParallel(model()), tokens_TD),
        "ddp+hook": _plain_step(hooked, tokens_TD),
    }


def _plain_step(model: nn.Module, tokens_TD: Tensor) -> Step:
    def step() -> None:
        model.zero_grad()
        model(tokens_TD).sum().backward()

    return step


def _reduced_step(model: nn.Module, tokens_TD: Tensor, mode: ReductionMode) -> Step:
    reducer = GradientReducer(model.named_parameters(), groups=build_groups(), mode=mode)
    plain = _plain_step(model, tokens_TD)

    def step() -> None:
        reducer.prepare(sync=True)
        plain()
        reducer.finish()

    return step


def _take_turns(steps: dict[str, Step], repeats: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 1):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            if turn > 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _discard(_: Tensor) -> None:
    pass
