"""Trainings whose own code does what a play of a step has to put back, cannot be given on another rank, or cannot do twice."""

from __future__ import annotations

import queue
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from typing_extensions import override

from campaign._audits import Audited, AuditedStages, draw_setup
from campaign._pipelined import PipelinedModule
from campaign._training import Module
from lightning_moe_ckpt.testing import Attempt

LATE = 6
"""Step in which a habit begins that is not there from the start."""


class Takes(Callback):
    """A list in a callback, to which steps add."""

    def __init__(self) -> None:
        self.seen = [0.0]


class Doing:
    """What a step does beside its loss; `habit` returns a factor of the loss."""

    times = 0
    seen: list[float] = []  # noqa: RUF012  # the user's mistake is the point

    def begin(self, habit: str, life: Attempt) -> None:
        self.habit_name, self.rank_of_life = habit, life.rank
        if habit == "iterator":
            self.numbers = iter(range(10_000))
        elif habit == "generator":
            self.numbers = iter_numbers()
        elif habit == "queue":
            self.waiting: Any = queue.Queue()

    def habit(self, batch: Any) -> float:
        step: int = self.trainer.global_step  # type: ignore[attr-defined]
        return float(getattr(self, f"_{self.habit_name}", lambda *_: 1.0)(step, batch))

    def _groups(self) -> Iterator[dict[str, Any]]:
        for each in self.trainer.optimizers:  # type: ignore[attr-defined]
            yield from each.param_groups

    def _edited_rate(self, step: int, batch: Any) -> float:
        for group in self._groups():
            group["lr"] *= 0.99
        return 1.0

    def _scheduler(self, step: int, batch: Any) -> float:
        if not hasattr(self, "own_scheduler"):
            self.own_scheduler = torch.optim.lr_scheduler.ExponentialLR(self.trainer.optimizers[0], 0.97)  # type: ignore[attr-defined]
        self.own_scheduler.step()
        return 1.0

    def _iterator(self, step: int, batch: Any) -> float:
        return 1 + 0.01 * (next(self.numbers) % 5)

    _generator = _iterator

    def _class_counter(self, step: int, batch: Any) -> float:
        Doing.times += 1
        Doing.seen.append(1.0)
        return 1 + 0.01 * ((Doing.times + len(Doing.seen)) % 5)

    def _global_counter(self, step: int, batch: Any) -> float:
        COUNTS["times"] += 1
        return 1 + 0.01 * (COUNTS["times"] % 5)

    def _late_buffer(self, step: int, batch: Any) -> float:
        if step >= LATE and not hasattr(self, "late"):
            self.register_buffer("late", torch.zeros(()))  # type: ignore[attr-defined]
        if step >= LATE:
            late: Tensor = self.late  # type: ignore[attr-defined]
            late += mean_of(batch)
            return 1 + 0.01 * float(late)
        return 1.0

    def _rank_buffer(self, step: int, batch: Any) -> float:
        if step >= 1 and self.rank_of_life == 0 and not hasattr(self, "only_here"):
            self.register_buffer("only_here", torch.zeros(2), persistent=False)  # type: ignore[attr-defined]
        return 1.0

    def _only_one_rank(self, step: int, batch: Any) -> float:
        return 1 + 0.1 * (step >= LATE and self.rank_of_life == 0)

    def _each_rank(self, step: int, batch: Any) -> float:
        return 1 + 0.1 * self.rank_of_life * (step >= LATE)

    def _gather(self, step: int, batch: Any) -> float:
        if step < LATE or not dist.is_initialized():
            return 1.0
        found = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(found, torch.tensor([mean_of(batch)]))
        return 1 + 0.01 * float(found[0]) + 0.02 * float(found[-1])

    def _reduce(self, step: int, batch: Any) -> float:
        if step < LATE or not dist.is_initialized():
            return 1.0
        dist.all_reduce(found := torch.tensor([mean_of(batch)]))
        return 1 + 0.01 * float(found)

    def _broadcast(self, step: int, batch: Any) -> float:
        if not dist.is_initialized():
            return 1.0
        dist.broadcast(found := torch.tensor([mean_of(batch)]), 0)
        return 1 + 0.01 * float(found)

    def _callback(self, step: int, batch: Any) -> float:
        taken = next(each for each in self.trainer.callbacks if isinstance(each, Takes))  # type: ignore[attr-defined]
        if step >= LATE:
            taken.seen.append(mean_of(batch))
        return 1 + 0.01 * taken.seen[-1]

    def _data_set(self, step: int, batch: Any) -> float:
        data = self.trainer.train_dataloader.dataset  # type: ignore[attr-defined]
        if step >= LATE:
            data.written = [*getattr(data, "written", []), mean_of(batch)]
        return 1 + 0.01 * float(getattr(data, "written", [0.0])[-1])

    def _queue(self, step: int, batch: Any) -> float:
        self.waiting.put(mean_of(batch))
        return 1 + 0.01 * float(self.waiting.get()) if step % 2 else 1.0

    def _edit(self, step: int, batch: Any) -> float:
        with torch.no_grad():
            for each in self.parameters() if step % 5 == 4 else ():  # type: ignore[attr-defined]
                each.mul_(0.99)
        return 1.0

    def _clamp(self, step: int, batch: Any) -> float:
        for each in self.parameters() if step % 5 == 4 else ():  # type: ignore[attr-defined]
            each.data.clamp_(-0.05, 0.05)
        return 1.0

    def _replaced(self, step: int, batch: Any) -> float:
        first = next(iter(self.parameters()))  # type: ignore[attr-defined]
        if step % 5 == 4:
            first.data = first.data * 0.99
        return 1.0

    def _freezes(self, step: int, batch: Any) -> float:
        if step >= LATE:
            next(iter(self.parameters())).requires_grad_(step % 2 == 0)  # type: ignore[attr-defined]
        return 1.0

    def _raises_elsewhere(self, step: int, batch: Any) -> float:
        if step >= LATE and batch is not self.own_batch:
            raise RuntimeError("this is another rank's batch")
        return 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.habit_name == "raises_elsewhere":
            self.own_batch = batch


COUNTS = {"times": 0}


def iter_numbers() -> Iterator[int]:
    yield from range(10_000)


def mean_of(batch: Any) -> float:
    return float(tensors_of(batch)[0].float().mean()) / 100


class HabitualModule(Doing, Module):
    """A `Module` with a habit, whose batches may be of an odd kind."""

    def __init__(self, setup: Any, life: Attempt) -> None:
        super().__init__(setup, life)
        self.begin(setup.habit, life)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.habit_name == "skipped" and batch_idx % 2 == 0:
            return None
        factor = self.habit(batch)
        return super().training_step(tensors_of(batch), batch_idx) * factor

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch if self.habit_name == "batch_required" else self._odd(batch)

    @override
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._odd(batch) if self.habit_name == "batch_required" else batch  # Lightning makes none of it anew

    def _odd(self, batch: Any) -> Any:
        kind = self.habit_name.removeprefix("batch_")
        return KINDS[kind](batch, self.rank_of_life) if kind in KINDS and self.trainer.training else batch


class HabitualStages(Doing, PipelinedModule):
    """A module in stages with a habit."""

    def __init__(self, setup: Any, life: Attempt) -> None:
        super().__init__(setup, life)
        self.begin(setup.habit, life)

    @override
    def stage_loss(self, output: Tensor, target: Tensor) -> Tensor:
        factor = self.habit([target]) if self.training else 1.0
        return super().stage_loss(output, target) * factor


@dataclass(frozen=True, kw_only=True)
class Habitual(Audited):
    """An audited training with a habit."""

    habit: str = ""

    @override
    def make_module(self, life: Attempt) -> Module:
        return HabitualModule(self, life)

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        return [*super().callbacks(life), Takes()]


@dataclass(frozen=True, kw_only=True)
class HabitualInStages(AuditedStages):
    """An audited training in stages with a habit."""

    habit: str = ""

    @override
    def make_module(self, life: Attempt) -> Module:
        return HabitualStages(self, life)

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        return [*super().callbacks(life), Takes()]


class Pair(NamedTuple):
    """A batch with names."""

    x: Tensor
    y: Tensor


class Required(dict[str, Any]):
    """A dictionary that wants an argument."""

    def __init__(self, name: str, **items: Any) -> None:
        super().__init__(**items)
        self.name = name


@dataclass
class Held:
    """A batch with fields that no constructor takes."""

    x: Tensor
    y: Tensor
    scale: InitVar[float]
    sum: Tensor = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.sum = self.x.sum() * scale
        self.x = self.x + 0


@dataclass
class OtherHeld:
    """Another kind for another rank."""

    x: Tensor
    y: Tensor


def held_of(batch: Any) -> Held:
    x, y = batch
    return Held(x, y, 0.5)


def default_of(batch: Any) -> Any:
    made = defaultdict[str, Any](list)
    made["x"], made["y"] = batch
    return made


KINDS: dict[str, Callable[[Any, int], Any]] = {
    "pair": lambda batch, _: Pair(*batch),
    "default": lambda batch, _: default_of(batch),
    "required": lambda batch, _: Required("it", x=batch[0], y=batch[1]),
    "held": lambda batch, _: held_of(batch),
    "either": lambda batch, rank: OtherHeld(*batch) if rank % 2 else held_of(batch),
    "packed": lambda batch, _: (nn.utils.rnn.pack_sequence([*batch[0]]), batch[0], batch[1]),
    "unsendable": lambda batch, _: (*batch, lambda: None),
}


def tensors_of(batch: Any) -> list[Tensor]:
    """The two tensors of a batch of whichever kind."""
    if isinstance(batch, dict):
        return [batch["x"], batch["y"]]
    if isinstance(batch, Held | OtherHeld | Pair):
        return [batch.x, batch.y]
    return [*batch[1:]] if isinstance(batch[0], nn.utils.rnn.PackedSequence) else [*batch[:2]]


HABITS = [
    *("edited_rate", "scheduler", "iterator", "generator", "class_counter", "global_counter", "late_buffer"),
    *("rank_buffer", "only_one_rank", "each_rank", "gather", "reduce", "broadcast", "callback", "data_set", "queue"),
    *("edit", "clamp", "replaced", "freezes", "raises_elsewhere", *(f"batch_{kind}" for kind in KINDS)),
]
IN_STAGES = ["class_counter", "global_counter", "only_one_rank", "each_rank", "callback", "iterator", "edited_rate"]
"""Habits that a module in stages may have."""


def draw_habit(place: str, number: int, habit: str | None = None) -> Audited:
    """A training in a place, with a habit, by a number."""
    rng, setup = random.Random(f"habits {place} {number}"), draw_setup(place, number)
    values = {each.name: getattr(setup, each.name) for each in fields(setup)}
    if isinstance(setup, AuditedStages):
        return HabitualInStages(**values, habit=habit or rng.choice(IN_STAGES))
    drawn = habit or rng.choice([*HABITS, *["skipped"] * (setup.world_size == 1)])
    # DDP itself fails where ranks have other buffers; with experts in parallel other ranks wait for one that raises.
    if (drawn == "rank_buffer" and setup.strategy == "ddp") or (
        drawn == "raises_elsewhere" and setup.expert_parallel > 1
    ):
        drawn = "clamp"
    found = Habitual(**values, habit=drawn)
    return replace(found, accumulate=2) if drawn == "skipped" else found
