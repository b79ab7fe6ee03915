"""What other ranks wrote of a boundary besides parameters: each rank of now gets its share, and what is not exact is named."""

from __future__ import annotations

import io
import logging
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny
import torch
from campaign._states import in_storage
from launcher import WorldFailed, run_world
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, SumMetric
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
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
from lightning_moe_ckpt.policies import STORAGE, Selection, TokenLedger
from lightning_moe_ckpt.recovery import joined_outcome
from lightning_moe_ckpt.recovery._outcomes import own_outcome
from lightning_moe_ckpt.snapshot import Topology

ITEMS, GLOBAL_BATCH = 48, 12


@pytest.fixture(scope="module", autouse=True)
def no_seed_of_an_earlier_test() -> Iterator[None]:
    """Lightning would seed all ranks alike."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PL_GLOBAL_SEED", raising=False)
        yield


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
        self.seen: Tensor = self.seen + value.sum()

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
        sync: dict[str, Any] = {"on_step": False, "on_epoch": True, "sync_dist": True, "batch_size": len(ids)}
        self.log("mean", value.mean(), **sync)
        self.log("sum", value.sum(), reduce_fx="sum", **sync)
        self.log("max", value.max(), reduce_fx="max", **sync)
        self.samples.append([self.trainer.global_step, *ids.tolist()])
        loss: Tensor = self(x).square().mean()
        return loss

    @override
    def on_train_epoch_end(self) -> None:
        metrics = {"total": self.total, "average": self.mean, "top": self.top, "all": self.all}
        found = {name: metric.compute() for name, metric in metrics.items()}
        self.ended = self.ended or {**found, "all": found["all"].sort().values}
        for metric in (*metrics.values(), self.own):
            metric.reset()

    @override
    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch == 1:
            self.ended |= {name: self.trainer.callback_metrics[name] for name in ("mean", "sum", "max")}


class Found(NamedTuple):
    """What a training of all ranks has done."""

    steps: dict[int, list[int]]
    """Samples of all ranks, by step, in order of their number."""
    ended: dict[str, Any]
    """Values at the first epoch's end."""
    weights: dict[str, Tensor]
    log: str
    """What rank 0 has logged as a warning."""


def train(folder: Path, ranks: int, steps: int, *callbacks: Callback, data: Any = None, **options: Any) -> Found:
    """Train on `ranks` up to a step; without `folder` nothing is stored."""
    given = {"every_n_steps": 2, "untouched": ["module.samples", "module.ended"], **options.pop("arguments", {})}
    arguments = {name: each for name, each in given.items() if each is not None}
    batch, make = options.pop("batch", GLOBAL_BATCH // ranks), options.pop("policy", DenseCheckpoint)
    options = {"strategy": "moe", "devices": ranks, "use_distributed_sampler": data is None, **options}

    def rank(number: int) -> Any:
        torch.manual_seed(0)
        module = Logging()
        torch.manual_seed(1 + number)  # ranks draw apart from each other
        random.seed(1 + number)
        lines = io.StringIO()
        handler = logging.StreamHandler(lines)
        handler.setLevel(logging.WARNING)
        logging.getLogger("lightning_moe_ckpt").addHandler(handler)
        loader = DataLoader(Numbered(), batch, shuffle=True) if data is None else data()
        tiny.fit(module, loader, make(str(folder), **arguments), *callbacks, max_steps=steps, **options)
        return module.samples, module.ended, module.state_dict(), lines.getvalue()

    found = run_world(ranks, rank, process_group=False) if options["strategy"] == "moe" else [rank(0)]
    rows = [row for samples, *_ in found for row in samples]
    samples = {step: sorted(i for at, *ids in rows if at == step for i in ids) for step, *_ in rows}
    return Found(samples, *found[0][1:])


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
    return [each.journal["start"] for each in found], [*found[0].notes]


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
    assert notes[:2] == ["callbacks `Counts`", "attributes `callback.Counts.number`"]
    assert len(notes) == 3
    for start in starts:
        assert start["callbacks"]["Counts"] == {"number": 2}
        assert start["batch"] is None
        assert start[OTHER_RANKS] == 4
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
    ledgers = [
        each.take(6, Selection(memory=rows, storage=rows))
        for each, rows in zip(ledgers, (((1,), (0, 1)), ((0, 2),)), strict=True)
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


# -- whole trainings


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """One that stays on two ranks."""
    return train(tmp_path_factory.mktemp("undisturbed"), 2, 7)


SAME_STEPS: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "more ranks": (2, 3, {}, {}),
    "by accumulation": (4, 2, {}, {"batch": 3, "accumulate_grad_batches": 2}),
    "of accumulation": (2, 4, {"batch": 2, "accumulate_grad_batches": 3}, {}),
}


@pytest.mark.parametrize("case", SAME_STEPS)
def test_steps_take_the_same_samples_as_on_the_ranks_of_before(case: str, undisturbed: Found, tmp_path: Path) -> None:
    """Where a step has as many in all: so do the epoch's values; and a second start does all that the first did."""
    was, ranks, before, after = SAME_STEPS[case]
    first = train(tmp_path / "one", was, 3, **before)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    found, *again = (train(tmp_path / name, ranks, 7, **after) for name in ("one", "two")[: 1 + (ranks > was)])
    assert {**first.steps, **found.steps} == undisturbed.steps
    assert list(found.steps) == [3, 4, 5, 6]
    assert not differs(found.ended, undisturbed.ended)
    assert not any(differs(each.weights, found.weights) for each in again)
    assert f"resumes on {ranks} ranks" not in found.log, "which is no warning"
    assert "random numbers, which ranks drew apart from each other" in found.log
    assert "samples" not in found.log.replace("behind the samples that it has consumed", "")


class Fails(Callback):
    """Ends a training in the middle of a window."""

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 6:
            raise RuntimeError("as told")


def test_repeated_steps_take_the_same_samples_too(undisturbed: Found, tmp_path: Path) -> None:
    """With your accumulation from the first of them on; their losses, other ranks' ones, are not compared."""
    sparse: dict[str, Any] = {"policy": SparseCheckpoint, "arguments": {"every_n_steps": None, "window": 2}}
    with pytest.raises(WorldFailed, match="as told"):
        train(tmp_path, 4, 9, Fails(), **sparse)
    found = train(tmp_path, 2, 7, batch=3, accumulate_grad_batches=2, **sparse)
    assert "steps are trained again on other ranks" in found.log
    assert found.steps == {step: undisturbed.steps[step] for step in found.steps}
    assert list(found.steps)[-1] == 6
    assert "another loss" not in found.log
    assert "other losses" not in found.log


def in_order(epoch: int = 0) -> list[int]:
    """Return the samples of an epoch in the order in which torch gives them to all ranks."""
    sampler: DistributedSampler[int] = DistributedSampler(Numbered(), 1, 0)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_another_number_of_samples_per_step_goes_on_behind_whole_steps(tmp_path: Path) -> None:
    """And says how many come again, and what would keep the number."""
    train(tmp_path, 2, 2)
    found = train(tmp_path, 3, 5, batch=5)
    assert found.steps == {
        2: sorted(in_order()[15:30]),
        3: sorted(in_order()[30:45]),
        4: sorted(in_order()[45:]),
    }
    assert "took 12 samples (batch_size=6, accumulate_grad_batches=1), and takes 15 from here on" in found.log
    assert "To keep that number: batch_size=4\n" in found.log
    assert "the newest 9 samples are trained on again" in found.log


def test_between_epochs_nothing_has_a_place(tmp_path: Path) -> None:
    """The next epoch is that of the new ranks, whoever decides on its samples."""
    train(tmp_path, 2, 4)
    found = train(tmp_path, 1, 6, batch=8)
    assert found.steps == {4: sorted(in_order(1)[:8]), 5: sorted(in_order(1)[8:16])}
    assert "To keep that number: batch_size=12" in found.log
    assert "again" not in found.log


def test_from_one_process_to_many_samples_come_in_another_order(tmp_path: Path) -> None:
    """The plain sampler's order is another one than that of samplers that share an epoch."""
    train(tmp_path, 1, 2, strategy="auto")
    found = train(tmp_path, 2, 4)
    assert found.steps == {2: sorted(in_order()[24:36]), 3: sorted(in_order()[36:])}
    assert "were shuffled by RandomSampler and are shuffled by DistributedSampler now" in found.log


class Mine(Sampler[int]):
    """A sampler that knows its ranks by itself."""

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(range(ITEMS))

    def __len__(self) -> int:
        return ITEMS


class Stream(IterableDataset[Any]):
    """As many items, one after another."""

    @override
    def __iter__(self) -> Iterator[Any]:
        return map(Numbered().__getitem__, range(ITEMS))


OWN: dict[str, tuple[Callable[[], Any], str]] = {
    "sampler": (lambda: DataLoader(Numbered(), 6, sampler=Mine()), "the sampler `Mine`"),
    "batches": (
        lambda: DataLoader(Numbered(), batch_sampler=BatchedMine(Mine(), 6, drop_last=False)),
        "the batch sampler `BatchedMine`",
    ),
    "stream": (lambda: DataLoader(Stream(), 6), "the iterable data set `Stream`"),
}


class BatchedMine(BatchSampler):
    """A batch sampler of the user's."""


@pytest.mark.parametrize("kind", OWN)
def test_what_only_the_user_knows_is_refused_or_goes_on_with_what_comes(kind: str, tmp_path: Path) -> None:
    """Unless batches are logged, which is a way out of a run that has logged none."""
    data, said = OWN[kind]
    train(tmp_path, 1, 2, data=data)
    if kind in ("sampler", "stream"):
        with pytest.raises(WorldFailed, match=f"{said} decides which samples a rank takes"):
            train(tmp_path, 2, 4, data=data)
    found = train(tmp_path, 2, 3, data=data, arguments={"batches": "log"})
    assert found.steps == {2: sorted([*range(6)] * 2)}
