"""What a user of the callbacks meets in one process: arguments, errors, resume modes, and state beyond the model."""

from __future__ import annotations

import gc
import itertools
import logging
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from door import CheckpointCallback, MemoryName, SharedFile
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, Strategy
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe_ckpt.callbacks import DenseCheckpoint, DifferentialCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.errors import (
    ConfigurationError,
    Fenced,
    IdentityMismatch,
    NoUsableGeneration,
    StorageRefused,
)
from lightning_moe_ckpt.fit._limits import refuse_unsupported
from lightning_moe_ckpt.goodput import Goodput
from lightning_moe_ckpt.inspection import export
from lightning_moe_ckpt.inspection._export import Export
from lightning_moe_ckpt.policies import DensePolicy
from lightning_moe_ckpt.process._heap import _Owner
from lightning_moe_ckpt.storage import PosixBackend, RunStore, RunView, open_backend
from lightning_moe_ckpt.tiers import HostTier

FEATURES = 4


class Linear(tiny.ToZero):
    """Two layers, and a number of its own in Lightning checkpoints."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(nn.Linear(FEATURES, hidden), nn.Dropout(0.2), nn.Linear(hidden, 1))
        self.seen = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


def loader() -> DataLoader[Any]:
    return tiny.rows(torch.arange(24.0).view(6, FEATURES) / 24, shuffle=True)


def fit(
    checkpoint: CheckpointCallback,
    *others: Callback,
    steps: int = 6,
    module: LightningModule | None = None,
    **kwargs: Any,
) -> Trainer:
    """Train for `steps` optimizer steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about this tiny run
        trainer = tiny.quiet_trainer(*others, checkpoint, max_steps=steps)
        trainer.fit(module if module is not None else Linear(), **(kwargs or {"train_dataloaders": loader()}))
    return trainer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window=0"),
        ({"window": 20, "max_window": 16}, "exceeds its bound"),
        ({"budget_nbytes": 0}, "budget_nbytes=0"),
        ({"planner": "best"}, "planner='best'"),
        ({"order": "random"}, "order='random'"),
        ({"keep": 0}, "keep=0"),
        ({"resume": "maybe"}, "resume='maybe'"),
    ],
)
def test_an_argument_out_of_range_is_quoted(arguments: dict[str, Any], message: str) -> None:
    """The error shows the call as the user wrote it."""
    with pytest.raises(ConfigurationError, match=message):
        SparseCheckpoint("file:///nowhere", **arguments)
    with pytest.raises(ConfigurationError, match="every_n_steps=0"):
        DenseCheckpoint("file:///nowhere", every_n_steps=0)


def test_two_checkpoint_callbacks_are_refused(tmp_path: Path) -> None:
    """They would both resume the run."""
    with pytest.raises(ConfigurationError, match="DenseCheckpoint and SparseCheckpoint in one Trainer"):
        fit(SparseCheckpoint(str(tmp_path)), DenseCheckpoint(str(tmp_path)))


def test_a_report_before_the_fit_is_an_error(tmp_path: Path) -> None:
    """There is nothing to report."""
    with pytest.raises(ConfigurationError, match=r"before `Trainer\.fit`"):
        _ = DenseCheckpoint(str(tmp_path)).report


def test_what_a_module_draws_as_it_is_saved_moves_no_draw_of_training(tmp_path: Path) -> None:
    """The training has the bits of one with fewer checkpoints."""

    class Draws(Linear):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["drawn"] = torch.rand(1).item()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            pass

    ends = []
    for every in (1, 4):
        seed_everything(1, verbose=False)
        module = Draws()
        fit(DenseCheckpoint(str(tmp_path / str(every)), every_n_steps=every), module=module)
        ends.append(torch.cat([each.flatten() for each in module.parameters()]))
    assert torch.equal(*ends)


class StopsInSetup(Linear):
    """A module whose fit ends before it begins."""

    def setup(self, stage: str) -> None:
        raise ValueError(stage)


def test_the_report_of_a_fit_that_never_began_is_empty(tmp_path: Path) -> None:
    """No error, and not the figures of a fit before; `print` says so."""
    checkpoint = SparseCheckpoint(str(tmp_path), window=2)
    fit(checkpoint, steps=3)
    assert checkpoint.report.steps == 3
    with pytest.raises(ValueError, match="FITTING"):
        fit(checkpoint, steps=5, module=StopsInSetup())
    assert not checkpoint.report.began
    assert (checkpoint.report.steps, checkpoint.report.resumed_from, checkpoint.report.generations) == (0, None, {})
    assert checkpoint.report.goodput == Goodput()
    assert str(checkpoint.report) == "no figures: the fit ended before its run was opened"


def test_the_report_counts(tmp_path: Path) -> None:
    """Steps, window, generations, bytes and stall of a run that was not disturbed."""
    checkpoint = SparseCheckpoint(str(tmp_path), window=2)
    fit(checkpoint, steps=7)
    report = checkpoint.report
    assert (report.steps, report.window, report.resumed_from, report.replayed_steps) == (7, 2, None, 0)
    assert report.generations_complete == 3
    assert report.generations_committed >= 2
    assert report.nbytes_per_step > report.dense_nbytes / 2 > 0
    assert 0 < report.stall_seconds_per_step < report.overhead_seconds_per_step
    assert 0 < report.overhead.hooks < 1
    assert report.goodput.hooks == pytest.approx(report.overhead_seconds, rel=0.2)
    assert report.goodput.wall > report.seconds > report.goodput.productive > 0


def test_hooks_before_the_first_batch_are_outside_of_both_clocks(tmp_path: Path) -> None:
    """Their time counts neither as overhead nor as wall time, so that one is always a part of the other."""

    class SlowStart(Callback):
        seconds = 0.5

        def state_dict(self) -> dict[str, Any]:
            end, type(self).seconds = time.perf_counter() + self.seconds, 0.0
            while time.perf_counter() < end:
                pass  # works
            return {"x": 1}

    checkpoint = DenseCheckpoint(str(tmp_path), every_n_steps=10)
    fit(checkpoint, SlowStart(), steps=2)
    assert SlowStart.seconds == 0
    assert 0 < checkpoint.report.overhead_seconds < checkpoint.report.seconds


@pytest.fixture
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The heap of the tests is frozen before and after."""
    monkeypatch.setattr(_Owner, "others", False)
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("thawed")
def test_the_heap_is_frozen_while_training_and_only_then(tmp_path: Path) -> None:
    """From the first batch to the end of the fit, also if that fails; switched off, never.

    Before the first batch comes the one full collection. The first window's layout stays out of later ones, and so does, with
    the first generation, what was made since.
    """
    counts: list[int] = []

    class Count(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: object) -> None:
            counts.append(gc.get_freeze_count())
            if trainer.global_step == 6:
                raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        fit(SparseCheckpoint(str(tmp_path / "on"), window=2), Count(), steps=8)
    assert min(counts) > 1000
    grown = [after > before for before, after in itertools.pairwise(counts)]
    assert grown == [True, False, True] + [False] * 3
    assert gc.get_freeze_count() == 0
    counts.clear()
    anew = SparseCheckpoint(str(tmp_path / "on"), window=2, freeze_heap=False, resume="never")
    fit(anew, Count(), steps=6)
    assert counts == [0] * 6


def test_must_refuses_to_start_a_run(tmp_path: Path) -> None:
    """A typo in the URL of a long run should not start it from scratch."""
    with pytest.raises(NoUsableGeneration, match=r"resume=.must."):
        fit(DenseCheckpoint(str(tmp_path), resume="must"))


def test_must_resumes_and_never_starts_anew(tmp_path: Path) -> None:
    """The same URL, three ways."""
    fit(DenseCheckpoint(str(tmp_path)), steps=3)
    resumed = DenseCheckpoint(str(tmp_path), resume="must")
    fit(resumed, steps=5)
    assert (resumed.report.resumed_from, resumed.report.steps) == (3, 2)
    anew = DenseCheckpoint(str(tmp_path), resume="never")
    fit(anew, steps=4)
    assert (anew.report.resumed_from, anew.report.steps) == (None, 4)
    again = DenseCheckpoint(str(tmp_path))
    fit(again, steps=6)
    assert again.report.resumed_from == 4


def test_another_model_is_refused(tmp_path: Path) -> None:
    """The message says what to do."""
    fit(DenseCheckpoint(str(tmp_path)), steps=2)
    with pytest.raises(IdentityMismatch, match="start anew with resume='never'"):
        fit(DenseCheckpoint(str(tmp_path)), module=Linear(hidden=16))


def test_what_a_module_adds_to_checkpoints_is_restored(tmp_path: Path) -> None:
    """`on_save_checkpoint` and `on_load_checkpoint` work as in Lightning's own checkpoints."""
    fit(DenseCheckpoint(str(tmp_path)), steps=3)
    module = Linear()
    fit(DenseCheckpoint(str(tmp_path)), steps=5, module=module)
    assert module.seen == 5


class Numbers(LightningDataModule):
    """A data module that counts how often it was asked for its state."""

    def __init__(self) -> None:
        super().__init__()
        self.restored: dict[str, Any] | None = None

    def train_dataloader(self) -> DataLoader[Any]:
        return loader()

    def state_dict(self) -> dict[str, Any]:
        return {"position": (1, "two")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = state_dict


def test_the_state_of_a_data_module_is_restored(tmp_path: Path) -> None:
    """It comes back equal, types included."""
    fit(DenseCheckpoint(str(tmp_path)), steps=3, datamodule=Numbers())
    numbers = Numbers()
    fit(DenseCheckpoint(str(tmp_path)), steps=5, datamodule=numbers)
    assert numbers.restored == {"position": (1, "two")}


class Keeper(Callback):
    """A callback with state of any type."""

    def __init__(self, name: str, value: object) -> None:
        self.name, self.value = name, value
        self.restored: object = None

    @property
    def state_key(self) -> str:
        return self.name

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = state_dict["value"]


def test_callback_state_that_cannot_be_stored_is_named_and_the_rest_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One odd callback costs its own state only, and is said once."""
    with caplog.at_level(logging.WARNING):
        fit(DenseCheckpoint(str(tmp_path)), Keeper("plain", {1: "one"}), Keeper("odd", object()), steps=4)
    said = [record.message for record in caplog.records if "not restored after a restart" in record.message]
    assert len(said) == 1
    assert "odd" in said[0]
    plain, odd = Keeper("plain", None), Keeper("odd", None)
    fit(DenseCheckpoint(str(tmp_path)), plain, odd, steps=5)
    assert plain.restored == {1: "one"}
    assert odd.restored is None


class Takeover(Callback):
    """A later start of the same job opens its epoch while this one is training."""

    def __init__(self, url: str) -> None:
        self.url = url

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step == 2:
            backend = open_backend(self.url)
            store = RunStore.open(backend, resume="auto")
            newest = store.candidates()[0].generation
            assert store.open_incarnation(newest) is not None
            backend.close()


def test_a_run_that_was_taken_over_stops(tmp_path: Path) -> None:
    """Going on would waste the machine: nothing it does can be stored any more."""
    checkpoint = DenseCheckpoint(str(tmp_path), every_n_steps=1)

    class Patient(Callback):
        def on_train_batch_start(self, *args: object) -> None:
            checkpoint.wait_committed(10)

    with pytest.raises(Fenced, match="later start of this run has taken over"):
        fit(checkpoint, Takeover(str(tmp_path)), Patient(), steps=12)


def test_storage_that_fails_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The failure is reported, the next generation is stored, and a restart finds it."""
    put = PosixBackend.put
    failing = {"count": 0}

    def unreliable(self: PosixBackend, key: str, *views: bytes | memoryview) -> None:
        if "000000000002" in key:
            failing["count"] += 1
            raise StorageRefused("disk full, for this test")
        put(self, key, *views)

    monkeypatch.setattr(PosixBackend, "put", unreliable)
    checkpoint = DenseCheckpoint(str(tmp_path), every_n_steps=2)

    class Patient(Callback):
        def on_train_batch_start(self, *args: object) -> None:
            checkpoint.wait_committed(20)

    trainer = fit(checkpoint, Patient(), steps=6)
    assert trainer.global_step == 6
    assert failing["count"] > 0
    assert any("training goes on" in r.message and "disk full" in r.message for r in caplog.records)
    resumed = DenseCheckpoint(str(tmp_path))
    fit(resumed, steps=7)
    assert resumed.report.resumed_from == 6


def test_weights_changed_after_the_step_are_captured(tmp_path: Path) -> None:
    """A module that edits weights in `on_train_batch_end` resumes from the edited ones."""

    class Editing(Linear):
        def on_train_batch_end(self, *args: object) -> None:
            with torch.no_grad():
                self.net[0].weight.mul_(0.5)  # type: ignore[operator]

    def run(url: Path, *parts: int) -> dict[str, Tensor]:
        for steps in parts:
            seed_everything(steps, verbose=False)
            module = Editing()
            fit(SparseCheckpoint(str(url), window=2), steps=steps, module=module)
        return {name: value.clone() for name, value in module.state_dict().items()}

    seed_everything(4, verbose=False)
    whole = run(tmp_path / "whole", 4)
    again = run(tmp_path / "again", 4)
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_url_that_cannot_be_written_is_an_error_at_start(tmp_path: Path) -> None:
    """Not an hour later, at the first checkpoint."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        fit(DenseCheckpoint(str(tmp_path / "file" / "run")))


class Growing(Callback):
    """Keeps what it has seen: its state outgrows any record that was reserved for it."""

    def __init__(self) -> None:
        self.text = ""

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step == 3:
            self.text = "x" * 500_000

    def state_dict(self) -> dict[str, Any]:
        return {"text": self.text}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.text = state_dict["text"]


def test_a_journal_that_outgrows_its_record_costs_one_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next window has a larger record, in a larger ring; a restart finds it."""
    checkpoint = SparseCheckpoint(str(tmp_path), window=2, keep=10)

    class Patient(Callback):
        def on_train_batch_start(self, *args: object) -> None:
            checkpoint.wait_committed(20)

    fit(checkpoint, Growing(), Patient(), steps=11)
    lost = [record.message for record in caplog.records if "was not taken" in record.message]
    assert len(lost) == 1
    assert "the step journal takes" in lost[0]
    assert checkpoint.report.generations_complete == 4
    growing, resumed = Growing(), SparseCheckpoint(str(tmp_path))
    fit(resumed, growing, steps=12)
    assert (resumed.report.resumed_from, len(growing.text)) == (11, 500_000)


def test_without_room_for_a_larger_ring_the_smaller_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was given up to make room, which was not enough; where not even this has room at first, windows are skipped."""
    checkpoint, calls, create = SparseCheckpoint(tmp_path, window=2), itertools.count(), SharedFile.create

    def full_for_a_while(*args: Any, **options: Any) -> Any:
        if next(calls) in {1, 2, 3}:
            raise ConfigurationError("there is no room.")
        return create(*args, **options)

    monkeypatch.setattr(SharedFile, "create", full_for_a_while)
    fit(checkpoint, Growing(), steps=15)
    assert "takes its place" in caplog.text
    assert checkpoint.report.windows_skipped > checkpoint.report.windows_missed == 0


@pytest.mark.parametrize("window", [1, 2])
def test_memory_keeps_a_generation_while_its_rings_are_replaced(
    tmp_path: Path, shared_memory: Path, window: int
) -> None:
    """A history that doubles at every step outgrows ring after ring: what a kill would find is never older than before."""
    checkpoint = SparseCheckpoint(str(tmp_path), window=window, overhead_target=None)
    found, rings = list[int](), set[int]()

    class Doubling(Growing):
        def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
            self.text = "x" * 2 ** (8 + trainer.global_step)
            tier = HostTier(checkpoint_tag(shared_memory), shared_memory)
            found.append(max((holding.generation.step for holding in tier.holdings()), default=-1))
            tier.close()
            rings.update(path.stat().st_ino for path in shared_memory.glob("*.ring"))

    fit(checkpoint, Doubling(), steps=14)
    assert found == sorted(found), found
    assert found[-1] >= 6, found
    assert len(rings) > 1, "nothing was replaced"


def checkpoint_tag(shared: Path) -> str:
    names = [name for path in shared.glob("*.ring") if (name := MemoryName.parse(path.name)) is not None]
    return names[0].tag if names else "none"


def test_a_resumed_life_goes_on_deleting(tmp_path: Path) -> None:
    """What it was restored from is not kept for ever: only the newest generations are."""
    fit(DenseCheckpoint(str(tmp_path), keep=2), steps=4)
    checkpoint = DenseCheckpoint(str(tmp_path), keep=2, every_n_steps=1)

    class Patient(Callback):
        def on_train_batch_start(self, *args: object) -> None:
            checkpoint.wait_committed(20)

    fit(checkpoint, Patient(), steps=10)
    kept = sorted(int(path.name) for path in (tmp_path / "snap").iterdir() if any(path.rglob("_COMMITTED")))
    assert kept == [9, 10]


def test_averaging_that_swaps_the_scheduler_is_refused_at_start(tmp_path: Path) -> None:
    """Not found out by the first run that resumes with other learning rates."""
    with pytest.raises(ConfigurationError, match="Use WeightAveraging"):
        fit(SparseCheckpoint(str(tmp_path)), StochasticWeightAveraging(1e-3), steps=4)


@pytest.mark.parametrize(
    ("strategy", "instead"),
    [
        (DeepSpeedStrategy, "`ModelParallelStrategy` with `fully_shard`"),
        (FSDPStrategy, "`ModelParallelStrategy` with `fully_shard`"),
        (SingleDeviceXLAStrategy, "`strategy='moe'`"),
        (XLAStrategy, "`strategy='moe'`"),
    ],
)
def test_strategies_whose_tensors_are_not_plain_are_refused_by_name(strategy: type[Strategy], instead: str) -> None:
    """A subclass too; most of them cannot be made without their device."""
    trainer: Any = SimpleNamespace(strategy=object.__new__(type("Own", (strategy,), {})))
    with pytest.raises(ConfigurationError, match=f"`{strategy.__name__}` .*{instead}"):
        refuse_unsupported(trainer, DensePolicy())


def test_pruning_while_training_is_refused_at_start(tmp_path: Path) -> None:
    """It replaces parameters, which no resumed run would have."""
    pruning = ModelPruning("l1_unstructured", amount=0.3, parameter_names=["weight"])
    with pytest.raises(ConfigurationError, match="Prune when training has ended"):
        fit(DenseCheckpoint(str(tmp_path)), pruning, steps=4)


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
def test_a_step_that_fetches_by_itself_is_refused_at_start(tmp_path: Path) -> None:
    """Lightning's experimental signature; it failed at the third step."""

    class Fetches(BoringModel):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return super().training_step(next(dataloader_iter)[0], 0)

    trainer = Trainer(accelerator="cpu", devices=1, max_steps=4, callbacks=[DenseCheckpoint(tmp_path)], logger=False)
    with pytest.raises(ConfigurationError, match="fetches within the step"):
        trainer.fit(Fetches())


POLICIES = (DenseCheckpoint, DifferentialCheckpoint, SparseCheckpoint)


def in_turns(ways: Sequence[str]) -> list[Any]:
    """Each way under each policy; of these an ordinary run has each way once, and each policy: what happens is no matter of policies."""
    rows = itertools.product(enumerate(POLICIES), enumerate(ways))
    return [pytest.param(policy, way, marks=[pytest.mark.soak] * (j % 3 != i)) for (i, policy), (j, way) in rows]


@pytest.mark.parametrize(("policy", "how"), in_turns(["in both", "in the module", "leaves", "with its optimizer"]))
def test_training_goes_on_without_checkpoints_when_a_parameter_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: Any, how: str
) -> None:
    """What is trained then is no part of what is stored: a restart would have the old one, so it begins before that."""

    class Swaps(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            group, old = trainer.optimizers[0].param_groups[0], pl_module.get_parameter("net.0.weight")
            if trainer.global_step != 8:
                return
            new = nn.Parameter(old.detach().clone())
            if how == "with its optimizer":
                trainer.optimizers = [torch.optim.Adam(pl_module.parameters())]
                return
            if how != "leaves":
                pl_module.get_submodule("net.0").weight = new
            if how != "in the module":
                mine = [new] if how == "in both" else []
                group["params"] = [*mine, *(param for param in group["params"] if param is not old)]

    trained = fit(policy(str(tmp_path), overhead_target=None), Swaps(), steps=16)
    assert trained.global_step == 16
    told = [record.getMessage() for record in caplog.records if "goes on without checkpoints" in record.getMessage()]
    assert len(told) == 1
    assert ("without `net.0.weight`" in told[0]) != (how == "with its optimizer")
    again = policy(str(tmp_path), overhead_target=None)
    assert fit(again, steps=16).global_step == 16
    assert again.report.resumed_from is not None
    assert again.report.resumed_from < 8


@pytest.mark.parametrize(
    ("policy", "begins"), in_turns(["on_train_start", "on_before_zero_grad", "on_train_epoch_start"])
)
def test_a_buffer_registered_in_training_is_named_and_leaves_restarts_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: Any, begins: str
) -> None:
    """As by a module that makes a mask in its first forward pass: a new process has none before that."""

    def register(self: Callback, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.register_buffer("mask", torch.ones(3))

    registers = type("Registers", (Callback,), {begins: register})
    for steps in (8, 16):
        caplog.clear()
        again = policy(str(tmp_path), overhead_target=None)
        assert fit(again, registers(), steps=steps).global_step == steps
        told = [record.getMessage() for record in caplog.records if "buffers mask" in record.getMessage()]
        assert len(told) == 1
    assert again.report.resumed_from == 8


@pytest.mark.parametrize("policy", [DenseCheckpoint, DifferentialCheckpoint, SparseCheckpoint])
def test_a_restart_replaces_a_parameter_before_its_first_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: Any
) -> None:
    """As pruning does at the start of an epoch: the plan is still made of what was there when `fit` began, and not taken.

    The newest checkpoint that memory has by then is stored at the end, even if storage was busy when it was complete.
    """

    class Prunes(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            module = pl_module.get_submodule("net.0")
            if trainer.global_step >= 4 and "weight" in dict(module.named_parameters(recurse=False)):
                prune.l1_unstructured(module, "weight", 0.2)  # type: ignore[no-untyped-call]

    fit(policy(str(tmp_path), overhead_target=None), steps=4)
    for _ in range(2):
        caplog.clear()
        assert fit(policy(str(tmp_path), overhead_target=None), Prunes(), steps=12).global_step == 12
        assert len([record for record in caplog.records if "goes on without checkpoints" in record.getMessage()]) == 1


@pytest.mark.parametrize("steps", [6, 8])
def test_a_finished_run_that_is_started_again_ends_with_the_same_random_state(tmp_path: Path, steps: int) -> None:
    """What follows `fit`, as a test with dropout, draws the same: in the middle of an epoch and at its end."""
    fit(DenseCheckpoint(str(tmp_path)), steps=steps)
    ended = torch.get_rng_state()
    torch.manual_seed(99)
    fit(DenseCheckpoint(str(tmp_path)), steps=steps)
    assert torch.equal(torch.get_rng_state(), ended)


def test_a_callback_that_cannot_load_its_own_state_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lightning's class fails in `load_state_dict`: a run that began with it could not resume."""
    fit(DenseCheckpoint(str(tmp_path)), SpikeDetection(atol=1e9), steps=4)
    assert [
        record.getMessage().split(":")[0] for record in caplog.records if "SpikeDetection" in record.getMessage()
    ] == ["the state of SpikeDetection is not restored after a restart"]
    assert fit(DenseCheckpoint(str(tmp_path)), SpikeDetection(atol=1e9), steps=6).global_step == 6


def test_what_was_asked_of_batches_holds_for_all_lives(tmp_path: Path) -> None:
    """A journal with batches is of no use to a run that repositions its loader, and the other way round."""
    fit(SparseCheckpoint(str(tmp_path), window=2, batches="log"), steps=5)
    with pytest.raises(ConfigurationError, match=r"batches='reposition'.*written with 'log'.*resume='never'"):
        fit(SparseCheckpoint(str(tmp_path), window=2), steps=8)


class Stretching(Linear):
    """Its buffer has another shape from step 4 on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("history", torch.zeros(2))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 4:
            self.history = torch.zeros(3)


def test_a_buffer_that_changes_shape_is_in_the_next_plan_and_a_restart_has_its_shape(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan that expects another shape ends without a complaint."""
    with caplog.at_level(logging.WARNING, logger="lightning_moe_ckpt"):
        fit(SparseCheckpoint(str(tmp_path), window=2), steps=8, module=Stretching())
        again = Stretching()
        trainer = fit(SparseCheckpoint(str(tmp_path), window=2), steps=10, module=again)
    assert trainer.global_step == 10
    assert again.history.shape == (3,)
    assert "history" not in caplog.text


def test_a_report_prints_as_a_short_table(tmp_path: Path) -> None:
    """What a person asks first: from where, how far, what is stored where, and what it cost; before `fit` it says so."""
    checkpoint = SparseCheckpoint(str(tmp_path), window=2)
    with pytest.raises(ConfigurationError, match=r"has no figures before `Trainer.fit`"):
        str(checkpoint.report)
    fit(checkpoint, steps=6)
    said = dict(line.split("  ", 1) for line in str(checkpoint.report).splitlines())
    assert said["resumed from"].strip() == "nothing: a fresh start"
    assert said["window"].strip().startswith("2 steps, ")
    assert "storage 6" in said["newest step in"]
    assert "ms per step" in said["cost"]
    again = SparseCheckpoint(str(tmp_path), window=2)
    fit(again, steps=8)
    lines = str(again.report).splitlines()
    assert len(lines) <= 8
    assert max(map(len, lines)) <= 110
    assert re.match(r"resumed from +step 6 in .* MiB from storage", lines[0])


@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
def test_every_start_says_once_what_it_does(level: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By Lightning's own logger where nobody has set up the package's; with nothing left to train, as a warning."""
    caplog.set_level(level, "lightning_moe_ckpt")
    said = []
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        for steps in (4, 6, 6):
            caplog.clear()
            fit(SparseCheckpoint(str(tmp_path), window=2), steps=steps)
            words = ("began ", "resumed from ", "finished at ")
            said.append([record for record in caplog.records if record.getMessage().startswith(words)])
    assert [len(each) for each in said] == [1, 1, 1]
    assert [each[0].getMessage().split(":")[0] for each in said] == [
        f"began a new run at {tmp_path}",
        "resumed from step 4 (storage)",
        "finished at step 6",
    ]
    assert said[2][0].levelno == logging.WARNING
    assert "`max_steps=6` is reached" in said[2][0].getMessage()


class CountsForwards(Linear):
    """Counts in a buffer how often it is asked, by validation too."""

    forwards: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.forwards += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.forwards += 1


def test_no_resume_has_a_sanity_check(tmp_path: Path) -> None:
    """Neither between two epochs, nor within one, nor of a run that has finished: a count of forwards is that of one run."""
    found = []
    for steps in (6, 6, 9, 12):
        module = CountsForwards()
        data = {"train_dataloaders": loader(), "val_dataloaders": loader()}
        fit(DenseCheckpoint(str(tmp_path), every_n_steps=1), steps=steps, module=module, **data)
        found.append(int(module.forwards))
    assert found == [2 + 6 + 6, 2 + 6 + 6, 2 + 9 + 6, 2 + 12 + 12]


def test_without_an_optimizer_there_is_nothing_to_resume(tmp_path: Path) -> None:
    """`configure_optimizers` may return None, and Lightning then has something in its place that nobody knows."""

    class Untrained(Linear):
        def configure_optimizers(self) -> None:
            return None

    with pytest.raises(ConfigurationError, match="`configure_optimizers` returned None"):
        fit(DenseCheckpoint(str(tmp_path)), module=Untrained())


class Rated(Linear):
    """With a learning rate of its own."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.rate)


@pytest.mark.parametrize("change", ["nothing", "rate", "seed", "batch size", "threads"])
def test_another_rate_seed_batch_size_or_number_of_threads_than_the_stored_runs_is_said(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the script asks for by now, what the run has, and which of the two it goes on with; at the third start, too."""
    for start in range(3):
        changed = start > 0
        caplog.clear()
        if change == "threads":
            monkeypatch.setattr(torch, "get_num_threads", lambda found=2 if changed else 1: found)
        monkeypatch.setenv("PL_GLOBAL_SEED", "2" if changed and change == "seed" else "1")
        data = TensorDataset(torch.arange(96.0).view(24, FEATURES) / 96)
        batches = DataLoader(data, batch_size=2 if changed and change == "batch size" else 1)
        module = Rated(0.2 if changed and change == "rate" else 0.1)
        checkpoint = SparseCheckpoint(str(tmp_path), window=2)
        fit(checkpoint, steps=4 + 2 * start, module=module, train_dataloaders=batches)
        assert module.trainer.optimizers[0].param_groups[0]["lr"] == 0.1
        tables = [record.getMessage() for record in caplog.records if record.name.endswith("fit._settings")]
        rows = [line.split() for table in tables for line in table.splitlines()[2:] if line.startswith("  ")]
        row = {
            "nothing": [],
            "rate": ["optimizer.lr", "0.1", "0.2", "stored"],
            "seed": ["seed", "1", "2", "stored"],
            # the second start trained with batches of 2, and another number of threads, which is what the run has since
            "batch size": ["batch_size", "1", "2", "yours,"] if start == 1 else [],
            "threads": ["threads", "1", "2", "yours:"] if start == 1 else [],
        }[change]
        more = [["max_steps", str(2 + 2 * start), str(4 + 2 * start), "yours"]]
        assert [each[:4] for each in rows] == (sorted([*([row] if row else []), *more]) if changed else [])
        assert len(tables) == changed


def test_dense_generations_of_a_sparse_run_can_be_exported(tmp_path: Path) -> None:
    """One every so many steps in the place of a window, the newest of which stays, and no restart is less exact for it."""
    seen: list[tuple[int, list[tuple[int, bool]]]] = []
    exported: list[Export] = []
    url = tmp_path / "run"

    class Look(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            assert checkpoint.wait_committed(60)
            stored = RunView.open(open_backend(str(url))).generations()
            found = [
                (each.generation.step, len(each.commit.steps) == 1) for each in stored if each.commit and each.usable
            ]
            seen.append((trainer.global_step, found))
            if trainer.global_step == 24:
                step = next(at for at, dense in found if dense)
                exported.append(export(open_backend(str(url)), tmp_path / "out.safetensors", step=step))

    def trained(where: Path, steps: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = Linear()
        fit(checkpoint, *looks, steps=steps, module=module)
        return {name: value.clone() for name, value in module.state_dict().items()}

    looks: list[Callback] = [Look()]
    options: dict[str, Any] = {"window": 2, "dense_every_n_steps": 7, "overhead_target": None}
    checkpoint = SparseCheckpoint(url, **options)
    trained(url, 25)
    assert checkpoint.retention.dense == 1
    for step, found in seen[18:24]:
        kept = [at for at, dense in found if dense]
        assert len(kept) == 1, (step, found)
        assert 14 <= kept[0] <= step
        assert len(found) == (3 if kept[0] < found[1][0] else 2), "the last two stay besides"
    assert [each.step for each in exported] == [next(at for at, dense in seen[23][1] if dense)]
    looks.clear()
    checkpoint = SparseCheckpoint(url, **options)
    resumed = trained(url, 33)
    assert checkpoint.report.resumed_from == 25
    checkpoint = SparseCheckpoint(tmp_path / "other", window=2, overhead_target=None)
    whole = trained(tmp_path / "other", 33)
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
