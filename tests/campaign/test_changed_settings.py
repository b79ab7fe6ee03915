"""A run killed, and started again with other settings: the state resumed from is the stored run's, and then comes what is used.

What is used is compared with a run that nothing ends, in which a callback changes the same by hand at the step resumed from.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from door import checkpoint_of, digest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from typing_extensions import override

from campaign._campaign import Campaigns, changed_settings
from campaign._data import Tokens
from campaign._training import Checkpointing, Module, Setup
from lightning_moe_ckpt.testing import Attempt, Kill

ITEMS = 48
KILL = Kill(phase="forward", step=7, settle=10.0)
NOTES = (("untouched", ("callback.Looks.*",)),)
"""What a life notes is its own."""
SPARSE = Checkpointing(policy="sparse", window=3, arguments=NOTES)
DENSE = Checkpointing(policy="dense", every_n_steps=5, arguments=NOTES)
MINE = (("on_change", "mine"),)


@dataclass(frozen=True, kw_only=True)
class Changing(Setup):
    """A run of which lives after the first, or steps after one, have other settings."""

    change: tuple[tuple[str, Any], ...] = ()
    by_hand: int | None = None
    """Step at which a run without an end changes them."""
    stored: tuple[tuple[str, Any], ...] = ()
    """What they are before, where that is not the default."""
    steps_in_all: int = 11

    def of(self, life: Attempt, name: str, default: Any) -> Any:
        stored = dict(self.stored).get(name, default)
        return dict(self.change).get(name, stored) if self.by_hand is None and life.index else stored

    @override
    def make_module(self, life: Attempt) -> Module:
        return ChangingModule(self, life)

    @override
    def trainer_options(self, life: Attempt) -> dict[str, Any]:
        options = super().trainer_options(life)
        options |= {"max_epochs": -1, "max_steps": self.steps_in_all, "limit_val_batches": 0}
        for name in ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches"):
            options[name] = self.of(life, name, options[name])
        return options

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        schedule = [GradientAccumulationScheduler({0: 2, 2: 1})] if dict(self.stored).get("scheduled") else []
        return [*schedule, Looks(self)]

    @override
    def loaders(self, life: Attempt) -> tuple[Any, Any]:
        items, drop_last = Tokens(ITEMS, augment=False), dict(self.stored).get("drop_last", False)
        if self.by_hand is not None and "batch_size" in dict(self.change):
            sizes = (4, self.by_hand, dict(self.change)["batch_size"])
            return DataLoader(items, batch_sampler=ByHand(RandomSampler(items), sizes)), None
        options = {"num_workers": self.workers, "drop_last": drop_last}
        if self.of(life, "varying", False):
            return DataLoader(items, batch_sampler=ByHand(RandomSampler(items), (6, 3, 6))), None
        return DataLoader(items, self.of(life, "batch_size", 4), shuffle=True, **options), None

    @override
    def returned(self, life: Attempt, trainer: Trainer) -> dict[str, Any]:
        (looks,) = (callback for callback in trainer.callbacks if isinstance(callback, Looks))  # type: ignore[attr-defined]
        checkpoint = checkpoint_of(trainer)
        resumed = checkpoint.report.resumed_from if checkpoint is not None else None
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        return {"states": looks.states, "items": looks.items, "resumed": resumed, "rates": rates}


class ByHand(BatchSampler):
    """So many batches of one size, then others, in every epoch."""

    def __init__(self, sampler: RandomSampler, sizes: tuple[int, int, int]) -> None:
        super().__init__(sampler, sizes[0], drop_last=False)
        self.sizes = sizes

    @override
    def __iter__(self) -> Iterator[list[int]]:
        before, number, after = self.sizes
        order = iter(self.sampler)
        for index in itertools.count():
            batch = list(itertools.islice(order, before if index < number else after))
            if not batch:
                return
            yield batch

    @override
    def __len__(self) -> int:
        return ITEMS  # at least


class ChangingModule(Module):
    """Sets its optimizer up as the life says."""

    @override
    def configure_optimizers(self) -> Any:
        setup, life = self._setup, self._life
        assert isinstance(setup, Changing)
        optimizer = AdamW(
            self.parameters(), setup.of(life, "lr", 1e-2), weight_decay=setup.of(life, "weight_decay", 0.1)
        )
        steps = setup.of(life, "T_max", 40)
        if steps == 0:
            return optimizer
        when = {name: setup.of(life, name, usual) for name, usual in (("interval", "step"), ("frequency", 1))}
        return [optimizer], [{"scheduler": CosineAnnealingLR(optimizer, steps), **when}]


class Looks(Callback):
    """Notes the state before every step, and which items a step has; changes settings by hand where that is asked for."""

    def __init__(self, setup: Changing) -> None:
        self._setup = setup
        self.states: dict[int, str] = {}
        self.items: dict[int, list[int]] = {}
        tokens = Tokens(ITEMS, augment=False)
        self._index = {bytes(tokens[index][0].numpy()): index for index in range(ITEMS)}

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step not in self.states:
            if step == self._setup.by_hand:
                self._change(trainer)
            accumulate = dict(self._setup.change).get("accumulate_grad_batches", 0)
            if self._setup.by_hand is not None and step >= self._setup.by_hand and accumulate:
                progress = trainer.fit_loop.epoch_loop.batch_progress.current
                if "batch_size" in dict(self._setup.change) and step == self._setup.by_hand:
                    progress.ready = 2 * step + 1
                    pl_module.zero_grad()
                if (progress.ready - 1) % accumulate == 0:
                    trainer.accumulate_grad_batches = accumulate
            state = trainer.optimizers[0].state
            moments = (state[parameter]["exp_avg"] for parameter in pl_module.parameters() if parameter in state)
            self.states[step] = digest([*pl_module.parameters(), *moments])
        self.items.setdefault(step, []).extend(self._index[bytes(row.numpy())] for row in batch[0])

    def _change(self, trainer: Trainer) -> None:
        (group,) = trainer.optimizers[0].param_groups
        for name, value in self._setup.change:
            if name in ("lr", "T_max"):
                fresh = AdamW([Tensor([0.0])], dict(self._setup.change).get("lr", 1e-2))
                schedule = CosineAnnealingLR(fresh, dict(self._setup.change).get("T_max", 40))
                for _ in range(trainer.global_step):
                    fresh.step()
                    schedule.step()
                group["lr"], group["initial_lr"] = fresh.param_groups[0]["lr"], fresh.defaults["lr"]
                trainer.lr_scheduler_configs[0].scheduler.load_state_dict(schedule.state_dict())
            elif name in ("interval", "frequency"):
                setattr(trainer.lr_scheduler_configs[0], name, value)
            elif name in group:
                group[name] = value
            elif name not in ("batch_size", "accumulate_grad_batches"):
                setattr(trainer, name, value)


def killed_and_changed(campaigns: Campaigns, setup: Changing, kill: Kill = KILL) -> tuple[Any, Any, str]:
    """What the first life returns where nothing ends it, what the second one does, and its log."""
    (calm,) = campaigns.reference(replace(setup, change=()))
    *_, last = campaigns.run(setup, kill)
    assert last.outcome == "finished"
    return calm.returned(), last.returned(), last.log()


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"gradient_clip_val": 0.001}, "yours"),
    ({"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}, "yours"),
    ({"accumulate_grad_batches": 2}, "yours"),
    ({"batch_size": 2, "accumulate_grad_batches": 2}, "yours"),
    ({"batch_size": 3}, "yours"),
    ({"weight_decay": 0.5, "lr": 1e-3, "T_max": 20, "interval": "epoch"}, "stored"),
    ({"weight_decay": 0.5}, "mine"),
    ({"lr": 1e-3}, "mine"),
    ({"lr": 2e-2, "T_max": 20, "weight_decay": 0.0}, "mine"),
    ({"frequency": 2}, "mine"),
]
QUICK = [(1, SPARSE), (3, DENSE), (5, SPARSE), (8, SPARSE)]


def _changes() -> Iterator[Any]:
    for (index, (change, used)), checkpointing in itertools.product(enumerate(CHANGES), (SPARSE, DENSE)):
        marks = [] if (index, checkpointing) in QUICK else [pytest.mark.soak]
        name = f"{'-'.join(change)}-{used}-{checkpointing.policy}"
        yield pytest.param(checkpointing, change, used, id=name, marks=marks)


@pytest.mark.parametrize(("checkpointing", "change", "used"), list(_changes()))
def test_the_state_resumed_from_is_the_stored_runs_and_then_comes_what_is_used(
    campaigns: Campaigns, checkpointing: Checkpointing, change: Mapping[str, Any], used: str
) -> None:
    """Steps that are trained again have the stored run's items and lead to its state, and steps behind are those of a change by hand."""
    arguments = (*NOTES, *(MINE if used == "mine" else ()))
    setup = Changing(checkpointing=replace(checkpointing, arguments=arguments), change=tuple(change.items()))
    calm, found, log = killed_and_changed(campaigns, setup)
    resumed = found["resumed"]
    assert resumed in (5, 6, 7)
    again = [step for step in found["states"] if int(step) < resumed]
    assert len(again) == (2 if checkpointing is SPARSE else 0)
    assert found["states"][str(resumed)] == calm["states"][str(resumed)]  # before, it is not whole
    assert all(found["items"][step] == calm["items"][step] for step in again)
    by_hand = replace(setup, by_hand=resumed, change=() if used == "stored" else setup.change)
    expected = campaigns.reference(by_hand)[0].returned()
    for step in range(resumed, 11):
        assert found["items"][str(step)] == expected["items"][str(step)]
        assert found["states"][str(step)] == expected["states"][str(step)], step
    assert found["rates"] == expected["rates"]
    assert (found["states"]["10"] != calm["states"]["10"]) is (used != "stored")
    assert len(changed_settings(log)) == len(change)
    assert "not deterministic" not in log
    assert "is not the one of the original run" not in log


def _sizes() -> Iterator[Any]:
    for row in itertools.product((SPARSE, DENSE), (2, 5, 9), (False, True), (0, 2)):
        quick = [(SPARSE, 9, True, 2), (DENSE, 5, False, 0)]  # every value of each
        yield pytest.param(*row, marks=[] if row in quick else [pytest.mark.soak])


@pytest.mark.parametrize(("checkpointing", "size", "drop_last", "workers"), list(_sizes()))
def test_with_other_batches_every_item_of_the_epoch_comes_once(
    campaigns: Campaigns, checkpointing: Checkpointing, size: int, drop_last: bool, workers: int
) -> None:
    """In the epoch in which their size changes as in those behind it, whose batches are all of that size."""
    stored = (("drop_last", drop_last), ("T_max", 0))
    more: dict[str, Any] = {"stored": stored, "workers": workers, "steps_in_all": 60}
    setup = Changing(checkpointing=checkpointing, change=(("batch_size", size),), **more)
    calm, found, _ = killed_and_changed(campaigns, setup)
    resumed = found["resumed"]
    items = {int(step): each for step, each in {**calm["items"], **found["items"]}.items()}
    before = list(itertools.chain.from_iterable(calm["items"][str(step)] for step in range(resumed)))
    behind = [items[step] for step in range(resumed, 60)]
    rest = ITEMS - len(before)
    batches = max(1, rest // size) if drop_last else -(-rest // size)
    seen = list(itertools.chain(before, *behind[:batches]))
    assert len(set(seen)) == len(seen) == (min(ITEMS, len(before) + batches * size) if drop_last else ITEMS)
    whole = ITEMS // size if drop_last else -(-ITEMS // size)
    for start in range(batches, len(behind) - whole, whole):
        epoch = list(itertools.chain(*behind[start : start + whole]))
        assert [len(each) for each in behind[start : start + whole]][:-1] == [size] * (whole - 1)
        assert len(set(epoch)) == len(epoch) == (whole * size if drop_last else ITEMS)


def test_a_replay_over_the_end_of_an_epoch_has_the_stored_batches(campaigns: Campaigns) -> None:
    """Its rest, and the first ones of the next epoch, after which batches are those of the script."""
    setup = Changing(checkpointing=SPARSE, change=(("batch_size", 2),), steps_in_all=30)
    for step in (14, 16):
        calm, found, _ = killed_and_changed(campaigns, setup, Kill(phase="forward", step=step, settle=10.0))
        again, resumed = [state for state in found["states"] if int(state) < found["resumed"]], str(found["resumed"])
        assert found["states"][resumed] == calm["states"][resumed]
        assert [len(found["items"][str(each)]) for each in range(found["resumed"], 30)] == [2] * (30 - found["resumed"])
        assert all(len(found["items"][each]) == 4 for each in again)


def test_what_a_callback_accumulates_is_state(campaigns: Campaigns) -> None:
    """It sets the trainer's argument by the epoch, and a restart within one goes on with that."""
    setup = Changing(checkpointing=SPARSE, stored=(("scheduled", True),))
    calm, found, log = killed_and_changed(campaigns, setup, Kill(phase="forward", step=4, settle=10.0))
    behind = [step for step in found["states"] if int(step) >= found["resumed"]]
    assert all(found["states"][step] == calm["states"][step] for step in behind)
    assert not changed_settings(log)


@pytest.mark.parametrize(
    ("stored", "change", "said"),
    [
        ({}, {"varying": True}, "this loader cannot give their batches"),
        ({}, {"T_max": 0}, r"has the schedulers \[CosineAnnealingLR\], and this start \[\]"),
        ({"T_max": 0}, {"T_max": 4}, r"has the schedulers \[\], and this start \[CosineAnnealingLR\]"),
    ],
    ids=["batches", "no scheduler", "another scheduler"],
)
def test_what_has_no_meaning_is_refused_by_name(
    campaigns: Campaigns, stored: Mapping[str, Any], change: Mapping[str, Any], said: str
) -> None:
    """Before anything is trained, with the way out."""
    setup = Changing(checkpointing=SPARSE, change=tuple(change.items()), stored=tuple(stored.items()))
    with pytest.raises(Exception, match=said):
        campaigns.run(setup, KILL)


def test_a_metric_that_a_scheduler_has_seen_stays(tmp_path: Any) -> None:
    """With another factor, and a rate that has the ratio to the first one that the stored one had."""
    from lightning_moe_ckpt.fit._settings import _step_again

    optimizer: Optimizer = AdamW([Tensor([0.0])], 1e-2)
    stored, own = (ReduceLROnPlateau(optimizer, factor=factor, patience=1) for factor in (0.5, 0.1))
    for value in (1.0, 2.0, 3.0):
        stored.step(value)
    _step_again(own, own.state_dict(), stored.state_dict())
    assert (own.factor, own.best, own.num_bad_epochs, own.last_epoch) == (0.1, 1.0, stored.num_bad_epochs, 3)
