"""What other ranks wrote of a boundary besides parameters: each rank of now gets its share, and what is not exact is named."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from campaign._states import in_storage
from launcher import run_world
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, SumMetric
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from lightning_moe_ckpt.callbacks import DenseCheckpoint
from lightning_moe_ckpt.fit._other_ranks import OTHER_RANKS, retold
from lightning_moe_ckpt.fit.loggers._metrics import module_metrics, settled
from lightning_moe_ckpt.journal import (
    capture_rng,
    differs,
    encode,
    held_state,
    restore_held,
    restore_rng,
    retold_rng,
)
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.policies import STORAGE, TokenLedger
from lightning_moe_ckpt.recovery import joined_outcome, own_outcome
from lightning_moe_ckpt.snapshot import Topology

ITEMS, GLOBAL_BATCH = 48, 12


class Numbered(Dataset[tuple[Tensor, Tensor]]):
    """Items with their number."""

    def __len__(self) -> int:
        return ITEMS

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(index), torch.full((4,), float(index)).sin()


class Own(Metric):
    """Its states are put together by nothing that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.zeros(()), dist_reduce_fx=None)

    @override
    def update(self, value: Tensor) -> None:
        self.seen = self.seen + value.sum()

    @override
    def compute(self) -> Tensor:
        return torch.as_tensor(self.seen).sum()


class Counts(Callback):
    """Has a state that differs from rank to rank, and an attribute that does."""

    number = 0

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.number += 1 + trainer.global_rank

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.number = state_dict["number"]


class Logging(tiny.ToZero):
    """Draws numbers, accumulates metrics of all kinds, and notes the samples of each step."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.total, self.mean, self.top, self.all, self.own = SumMetric(), MeanMetric(), MaxMetric(), CatMetric(), Own()
        self.samples: list[list[int]] = []
        self.ended: dict[str, Any] = {}

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, x = batch
        value = ids.double()
        for metric in (self.total, self.mean, self.top, self.all, self.own):
            metric.update(value)
        sync = {"on_step": False, "on_epoch": True, "sync_dist": True, "batch_size": len(ids)}
        self.log("mean", value.mean(), **sync)
        self.log("sum", value.sum(), reduce_fx="sum", **sync)
        self.log("max", value.max(), reduce_fx="max", **sync)
        self.samples.append([self.trainer.global_step, *ids.tolist()])
        return self(x).square().mean()

    @override
    def on_train_epoch_end(self) -> None:
        metrics = {"total": self.total, "mean": self.mean, "top": self.top, "all": self.all}
        found = {name: metric.compute() for name, metric in metrics.items()}
        self.ended = {**found, "all": found["all"].sort().values} | self.ended
        for metric in (*metrics.values(), self.own):
            metric.reset()


def train(
    folder: Path, ranks: int, steps: int, *callbacks: Callback, batch: int | None = None, **options: Any
) -> list[tuple[list[list[int]], dict[str, Any], dict[str, Any]]]:
    """Train on `ranks` up to a step; return each rank's samples by step, metrics of the first epoch's end, and weights."""
    keep = options.pop("keep", True)

    def rank(_: int) -> Any:
        torch.manual_seed(0)
        module = Logging()
        torch.manual_seed(1 + _)  # ranks draw apart from each other
        random.seed(1 + _)
        checkpoint = [DenseCheckpoint(str(folder), every_n_steps=2, **options.pop("arguments", {}))] if keep else []
        data = DataLoader(Numbered(), batch or GLOBAL_BATCH // ranks, shuffle=True)
        trainer = tiny.fit(
            module, data, *checkpoint, *callbacks, strategy="moe", devices=ranks, max_steps=steps, **options
        )
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return module.samples, {**logged, **module.ended}, module.state_dict()

    return run_world(ranks, rank, process_group=False)


@pytest.fixture(scope="module")
def journals_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Sequence[dict[str, Any]]]:
    """Return the journals of a number of ranks in the middle of an epoch, by rank."""

    @cache
    def journals(ranks: int) -> Sequence[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(str(ranks))
        train(folder / "checkpoints", ranks, 2, Counts())
        return [dict(part.journal) for part in in_storage(folder)[-1][1]]

    return journals


JournalsOf = Callable[[int], Sequence[dict[str, Any]]]


def told(journals: Sequence[dict[str, Any]], ranks: int, stages: int = 1) -> tuple[list[Any], list[str]]:
    """Return the start half of each rank, and what is named."""
    was = Topology(world_size=len(journals), pipeline_parallel=stages)
    found = [retold(journals, was, rank, ranks) for rank in range(ranks)]
    assert len({tuple(each.notes) for each in found}) == 1
    return [each.journal["start"] for each in found], found[0].notes


CHANGES = pytest.mark.parametrize(("was", "ranks"), [(4, 2), (2, 3), (3, 4)])


@CHANGES
def test_random_state_is_a_ranks_own_or_follows_from_one(journals_of: JournalsOf, was: int, ranks: int) -> None:
    """Ranks that were there keep their states at every moment, and further ranks get new ones, the same each time."""
    starts, notes = told(journals_of(was), ranks)
    assert not differs(starts, told(journals_of(was), ranks)[0])
    assert "random numbers, which ranks drew apart from each other" in notes
    for rank, start in enumerate(starts):
        states, now = [each["start"]["random"] for each in journals_of(was)], start["random"]
        if rank < was:
            assert not any(differs(states[rank][name], now[name]) for name in now if name != "workers")
        else:
            for kind in ("torch", "python"):
                assert all(differs(each["fetch"][kind], now["fetch"][kind]) for each in states)
            assert not differs(states[0]["fetch"]["numpy"], now["fetch"]["numpy"]), "in which ranks agree"
            held, before = {"own": np.random.default_rng()}, capture_rng()
            assert restore_rng({**now["fetch"], "held": {"own": held["own"].bit_generator.state}}, held=held) == []
            restore_rng(before)


GENERATORS: dict[str, Any] = {
    "cpu": lambda seed: torch.Generator().manual_seed(seed).get_state(),
    "device": lambda seed: torch.tensor([seed, 40]).view(torch.uint8),
    "python": lambda seed: held_state(random.Random(seed)),
    "legacy": lambda seed: held_state(np.random.RandomState(seed)),
    "mersenne": lambda seed: held_state(np.random.Generator(np.random.MT19937(seed))),
    "permuted": lambda seed: held_state(np.random.default_rng(seed)),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_of_any_kind_gets_another_state_of_its_kind(kind: str) -> None:
    """Which follows from the state of one rank and the numbers of ranks, and is left alone where ranks agree."""
    make = GENERATORS[kind]
    states = [{"held": {"own": make(1), "all": make(5)}}, {"held": {"own": make(2), "all": make(5)}}]
    found = {rank: retold_rng(states, rank, 4)[0]["held"] for rank in range(4)}  # type: ignore[index]
    assert not differs(found[1], states[1]["held"])
    assert len({encode(each["own"]) for each in found.values()}) == 4
    assert not differs(found[3], retold_rng(states, 3, 4)[0]["held"])  # type: ignore[index]
    assert differs(found[3], retold_rng(states, 3, 5)[0]["held"])  # type: ignore[index]
    assert all(not differs(each["all"], make(5)) for each in found.values())
    assert retold_rng([states[0], states[0]], 1, 4)[1]
    assert not retold_rng(states, 1, 4)[1]
    fresh: dict[str, Any] = {
        "cpu": torch.Generator(),
        "python": random.Random(),
        "legacy": np.random.RandomState(),
        "mersenne": np.random.Generator(np.random.MT19937()),
        "permuted": np.random.default_rng(),
    }
    if kind in fresh:
        assert restore_held(fresh[kind], found[3]["own"])
        assert not differs(held_state(fresh[kind]), found[3]["own"])


def reduced(metric: Metric, key: str, states: Sequence[Any]) -> Tensor:
    """Return a state as ranks with these states reduce it."""
    rows = [[each] if isinstance(each, Tensor) else each or [torch.tensor([])] for each in states]
    reduction: Any = metric._reductions[key]
    if reduction is dim_zero_cat:
        return torch.as_tensor(torch.cat([row.flatten() for each in rows for row in each]).sort().values)
    return torch.as_tensor(reduction(torch.stack([row for each in rows for row in each])))


@CHANGES
def test_metrics_reduce_to_what_the_ranks_of_before_would_have(journals_of: JournalsOf, was: int, ranks: int) -> None:
    """Sums, means, extremes and collected values, of the module's metrics and of logged values; others stay a rank's own."""
    before = [each["start"]["metrics"] for each in journals_of(was)]
    after = []
    for rank, start in enumerate(told(journals_of(was), ranks)[0]):
        after.append(settled(start["metrics"], Logging(), rank))
    for name, metric in module_metrics(Logging()):
        for key in metric._defaults:
            old, new = ([each["module"][name]["values"][key] for each in states] for states in (before, after))
            if name == "own":
                assert not differs(new, [old[rank % was] for rank in range(ranks)])
            else:
                assert torch.equal(reduced(metric, key, old), reduced(metric, key, new)), (name, key)
    for name in ("mean", "sum", "max"):
        old, new = ([each["epoch"][f"training_step.{name}"] for each in states] for states in (before, after))
        reduce = torch.max if name == "max" else torch.sum
        for key in ("value", "cumulated_batch_size"):
            if old[0][key] is not None:
                values, wanted = (torch.stack([each[key] for each in rows]) for rows in (new, old))
                assert torch.equal(reduce(values), reduce(wanted)), name


def test_what_differs_between_ranks_is_rank_0s_and_named(journals_of: JournalsOf) -> None:
    """Callbacks and attributes; nothing else is, and no digest is left to compare."""
    starts, notes = told(journals_of(4), 2)
    assert notes[:2] == [
        "callbacks `Counts`",
        "attributes `callback.Counts.number`, `module.samples.0`, `module.samples.1`",
    ]
    assert len(notes) == 3
    for start in starts:
        assert start["callbacks"]["Counts"] == {"number": 2}
        assert start["batch"] is None
        assert start[OTHER_RANKS] == {"was": 4}
    assert retold(journals_of(4), Topology(world_size=4), 0, 2).journal["outcome"]["losses"] is None


def test_stages_are_joined_and_cut_again() -> None:
    """Experts' tokens, popularity and scalars by layer: of two stages with two ranks each, for one stage or for two."""
    sizes = ((4, 2), (3,))
    ledgers = [TokenLedger.start(each) for each in sizes]
    ledgers = [
        each.add(torch.arange(len(each.alive)) + 1, torch.tensor([2] * len(each.num_experts))) for each in ledgers
    ]
    ledgers = [
        each.restore(each.alive - 1, torch.full_like(each.alive, 5), {STORAGE: each.alive > 2})[0] for each in ledgers
    ]

    def outcome(rank: int) -> dict[str, Any]:
        stage = rank // 2
        number = sum(sizes[stage])
        counts = [torch.full((number,), float(rank + at), dtype=torch.float64) for at in range(3)]
        return {
            "step": 5,
            "losses": [],
            "accounting": ledgers[stage].to_journal(),
            "scalars": {f"stage{stage}.weight": {"step": torch.tensor(5.0)}},
            "popularity": {"measure": {}, "value": counts[0], "held": counts[1:], "planned": counts[0] * 0 + stage},
        }

    joined = joined_outcome([outcome(rank) for rank in range(4)], 2)
    whole = TokenLedger.from_journal(joined["accounting"])
    assert whole.num_experts == (4, 2, 3)
    assert whole.alive.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert joined["popularity"]["value"].tolist() == [1.0] * 6 + [5.0] * 3
    assert joined["popularity"]["held"][1].tolist() == [5.0] * 6 + [9.0] * 3
    for rank in range(4):
        groups, stage = ParallelGroups.placed(rank, 4, num_stages=2), rank // 2
        layers = [SimpleNamespace(num_experts=number) for number in sizes[stage]]
        view: Any = SimpleNamespace(operators=SimpleNamespace(layers=layers), params={f"stage{stage}.weight": None})
        exchange: Any = SimpleNamespace(gather_values=lambda _: [list(sizes[0])] * 2 + [list(sizes[1])] * 2)
        own = own_outcome(joined, view, groups, exchange)
        found = TokenLedger.from_journal(own["accounting"])
        for name in ("alive", "processed", "lost", "taken", "dropped"):
            assert torch.equal(getattr(found, name), getattr(ledgers[stage], name)), name
        for level, ledger in ledgers[stage].saved.items():
            assert not differs(own["accounting"]["saved"][level], ledger.to_journal()), level
        assert own["scalars"] == outcome(rank)["scalars"]
        assert own["popularity"]["planned"].tolist() == [float(stage)] * sum(sizes[stage])
        added = joined["popularity"]["value"][:6] if stage == 0 else joined["popularity"]["value"][6:]
        assert torch.equal(own["popularity"]["value"], added * (rank % 2 == 0))
