"""Whatever goes wrong with memory or storage for a while: when it is over, no tier is more than two windows behind."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from door import CheckpointCallback, SharedFile
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import nn
from typing_extensions import override

from lightning_moe_ckpt.callbacks import (
    DenseCheckpoint,
    ExpertLoadMonitor,
    PartialExpertCheckpoint,
    Popularity,
    SparseCheckpoint,
)
from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError, RingFull, StorageError
from lightning_moe_ckpt.policies import SparsePolicy
from lightning_moe_ckpt.snapshot import BufferChanged, SegmentWriter
from lightning_moe_ckpt.storage import RunStore
from lightning_moe_ckpt.tiers import HostTier, SegmentRing

FEATURES = 8
BEGINS, ENDS, STEPS = 6, 16, 24
"""Steps between which the fault lasts, and of the whole run."""
PATIENCE = 60.0


def fit(*callbacks: Callback, steps: int = STEPS, bar: bool = False, net: LightningModule | None = None) -> None:
    torch.manual_seed(1)
    data = tiny.rows(tiny.waves(8, FEATURES))
    tiny.fit(net or tiny.with_experts(FEATURES), data, *callbacks, max_steps=steps, enable_progress_bar=bar)


# -- what goes wrong


class Switch:
    """A fault of calls, which fail, or stand still, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.over = threading.Event()
        self.struck = 0

    def begin(self) -> None:
        self.on = True

    def end(self) -> None:
        self.on = False
        self.over.set()

    def failing(self, method: Callable[..., Any], error: Callable[[], Exception]) -> Callable[..., Any]:
        """The method, which raises while the fault lasts."""

        def call(*args: Any, **options: Any) -> Any:
            if self.on:
                self.struck += 1
                raise error()
            return method(*args, **options)

        return call

    def standing_still(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, whose first call in the fault comes back when it is over."""

        def call(*args: Any, **options: Any) -> Any:
            if self.on:
                self.struck += 1
                assert self.over.wait(PATIENCE)
            return method(*args, **options)

        return call


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def gone() -> StorageError:
    return StorageError("this store does not answer.")


class Hang(Switch):
    """Calls come back when it is over: nobody can wait for them before."""


class Cleaner(Switch):
    """Removes names, as what tidies up shared memory does: all of them, or those of statements only."""

    def __init__(self, folder: Path, pattern: str) -> None:
        super().__init__()
        self._folder, self._pattern = folder, pattern

    @override
    def begin(self) -> None:
        for path in self._folder.glob(self._pattern):
            path.unlink(missing_ok=True)
            self.struck += 1


class FolderCleaner(Cleaner):
    """Removes the directory too."""

    @override
    def begin(self) -> None:
        super().begin()
        self._folder.rmdir()


class FromTheStart(Switch):
    """Goes on when the run begins."""

    @override
    def begin(self) -> None:
        assert self.on


def make_fault(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, with_folder: bool = False) -> Switch:
    switch = Hang() if kind == "storage hangs" else FromTheStart() if kind == "storage is down" else Switch()
    if kind == "names removed":
        return (FolderCleaner if with_folder else Cleaner)(folder, "*")
    if kind == "statements removed":
        return Cleaner(folder, "*.done")
    if kind == "memory full":
        monkeypatch.setattr(SegmentRing, "publish", switch.failing(SegmentRing.publish, full))
    elif kind == "storage hangs":
        monkeypatch.setattr(RunStore, "put_segment", switch.standing_still(RunStore.put_segment))
    else:
        calls: dict[str, tuple[str, Callable[[], Exception]]] = {
            "storage fails": ("put_segment", gone),
            "storage is down": ("put_segment", gone),
            "marker fails": ("put_marker", gone),
            "commit fails": ("commit", gone),
            "retention fails": ("retain", gone),
        }
        method, error = calls[kind]
        monkeypatch.setattr(RunStore, method, switch.failing(getattr(RunStore, method), error))
    return switch


class Watch(Callback):
    """Makes the fault begin and end, lets tiers catch up in each step, and looks at how far they are behind."""

    def __init__(self, checkpoint: CheckpointCallback, fault: Switch) -> None:
        self._checkpoint, self._fault = checkpoint, fault
        self.behind: dict[str, list[int]] = {"host": [], "storage": []}
        """Windows by which each tier is behind training, at every step."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fault.on = isinstance(self._fault, FromTheStart)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step == ENDS:
            self._fault.end()
        if not isinstance(self._fault, Hang) or not self._fault.on:
            assert self._checkpoint.wait_committed(PATIENCE)
        if step == BEGINS:
            self._fault.begin()
        report = self._checkpoint.report
        held = HostTier(str(self._checkpoint.memory_tag)).holdings()
        newest = {"host": held[0].generation.step if held else 0, "storage": report.generations.get("storage", 0)}
        for tier, numbers in self.behind.items():
            numbers.append(step - newest[tier])


POLICIES: dict[str, tuple[Callable[[Path], CheckpointCallback], int]] = {
    "dense": (lambda url: DenseCheckpoint(url, every_n_steps=1, overhead_target=None), 1),
    "sparse": (lambda url: SparseCheckpoint(url, window=2, overhead_target=None), 2),
    "partial": (lambda url: PartialExpertCheckpoint(url, every_n_steps=1, k=1, overhead_target=None), 1),
}
"""With steps per window."""


FAULTS = (
    "memory full", "names removed", "statements removed", "storage fails", "storage hangs", "storage is down",
    "marker fails", "commit fails", "retention fails",
)  # fmt: skip
QUICK = {
    "dense": ("memory full", "storage fails"),
    "sparse": FAULTS,
    "partial": ("memory full", "statements removed", "storage hangs", "marker fails", "retention fails"),
}
"""Each fault meets a window of several steps; whether one step is the whole window, and whether it holds all experts, matters
to few of them. `make soak` has every fault under every policy."""


def _fault(policy: str, kind: str) -> Any:
    marks = [] if kind in QUICK[policy] else [pytest.mark.soak]
    return pytest.param(policy, kind, id=f"{kind}-{policy}", marks=marks)


@pytest.mark.parametrize(("policy", "kind"), [_fault(policy, kind) for policy in POLICIES for kind in FAULTS])
def test_no_tier_stays_behind_when_a_fault_is_over(
    policy: str, kind: str, tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that had nothing to do with it; and while it lasts, those that have nothing to do with it."""
    make, window = POLICIES[policy]
    fault = make_fault(kind, shared_memory, monkeypatch, with_folder=policy == "sparse")
    checkpoint = make(tmp_path)
    watch = Watch(checkpoint, fault)
    fit(watch, checkpoint)
    assert fault.struck
    for tier, behind in watch.behind.items():
        assert max(behind[ENDS + 2 * window :]) <= 2 * window, f"{tier}: {behind}"


class Bar(TQDMProgressBar):
    """Remembers what it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str | None] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.shown.append(self.get_metrics(trainer, pl_module).get("no_checkpoint"))  # type: ignore[arg-type]


def test_windows_without_a_generation_are_an_error_wherever_somebody_looks(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The names of memory are removed, and there is no room to make it again for ten steps: log, report, metric and bar."""
    checkpoint, monitor, bar = DenseCheckpoint(tmp_path, every_n_steps=1), ExpertLoadMonitor(every_n_steps=1), Bar()
    fault = Cleaner(shared_memory, "*")
    no_room = fault.failing(SharedFile.create, lambda: ConfigurationError("there is no room."))
    missed: list[float] = []

    class Removal(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: object) -> None:
            if trainer.global_step == BEGINS:
                monkeypatch.setattr(SharedFile, "create", no_room)
                fault.begin()
                fault.on = True
            if trainer.global_step == ENDS:
                fault.end()
            missed.append(monitor.latest.get("moe/windows_missed", 0))

    with caplog.at_level(logging.WARNING):
        fit(bar, Removal(), monitor, checkpoint, bar=True)
    number = ENDS - BEGINS
    assert max(missed) == number
    assert missed[-1] == checkpoint.report.windows_missed == 0
    assert checkpoint.report.windows_skipped == number
    assert [*dict.fromkeys(filter(None, bar.shown))] == [f"{each} windows" for each in range(3, number + 1)]
    rows = [record for record in caplog.records if " windows in a row" in record.message]
    assert [record.levelno for record in rows] == [logging.ERROR, logging.WARNING]
    assert "the name of some rank's memory was removed, and it cannot be made again" in rows[0].message
    assert f"{number} windows in a row gave none" in rows[1].message
    assert sum("there is no room" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "fails",
    [
        (SegmentWriter, "take_local", BufferChanged("a buffer has grown")),
        (SegmentWriter, "recopy_changed", CheckpointError("a copy failed")),
        (SegmentRing, "acquire", RingFull("no slot is free")),
    ],
    ids=["buffer", "copy", "slot"],
)
def test_a_window_that_gives_nothing_costs_no_generation_that_is_there(
    policy: str,
    fails: tuple[type, str, Exception],
    tmp_path: Path,
    shared_memory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The newest one in memory stays until a newer one is there; storage gets it, if it was on its way."""
    make, window = POLICIES[policy]
    fault = Switch()
    owner, method, error = fails
    monkeypatch.setattr(owner, method, fault.failing(getattr(owner, method), lambda: error))
    checkpoint = make(tmp_path)
    watch = Watch(checkpoint, fault)
    fit(watch, checkpoint)
    assert fault.struck
    newest = [step - behind for step, behind in enumerate(watch.behind["host"])]
    assert newest == sorted(newest)
    assert max(watch.behind["host"][window:BEGINS]) <= 2 * window


class Late(tiny.ToZero):
    """Has a parameter that its optimizer gets later, and a journal whose size the windows do not matter to."""

    def __init__(self) -> None:
        super().__init__(*tiny.with_experts(FEATURES).net)
        self.late = nn.Parameter(torch.ones(3))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["large"] = torch.zeros(10_000)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), 1e-2)


def test_a_window_given_up_for_new_parameters_shares_its_name_with_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slower steps give a shorter window, which would end where that one was to end, and storage still reads from that."""
    hang, windows, plan = Hang(), iter((3, 1)), SparsePolicy.plan
    monkeypatch.setattr(RunStore, "put_segment", hang.standing_still(RunStore.put_segment))
    monkeypatch.setattr(SparsePolicy, "plan", lambda self, *args: plan(replace(self, window=next(windows)), *args))
    checkpoint = SparseCheckpoint(tmp_path, window=3, overhead_target=None)

    class Adding(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
            if trainer.global_step == 3:
                assert checkpoint.wait_committed(PATIENCE)
                hang.begin()
            if trainer.global_step == 4:
                trainer.optimizers[0].add_param_group({"params": [pl_module.late]})
            if trainer.global_step == 12:
                hang.end()

    fit(Adding(), checkpoint, net=Late())
    assert hang.struck
    assert checkpoint.report.generations_complete == 1 + STEPS - 5 - 1, "all but the one that would have had its name"


@pytest.mark.parametrize("policy", POLICIES)
def test_no_tier_has_failed_at_anything_after_a_run_without_a_fault(policy: str, tmp_path: Path) -> None:
    """The window that the end cuts short is nobody's failure."""
    checkpoint = POLICIES[policy][0](tmp_path)
    fit(checkpoint, steps=5)
    assert set(checkpoint.report.generations_failed.values()) == {0}


def test_no_plan_of_before_new_parameters_holds_behind_them(tmp_path: Path) -> None:
    """A new order of experts is due when parameters are added: it has no room for the optimizer state of these."""
    look = Popularity(reorder_every_n_steps=4, reorder_threshold=0.0, reorder_fraction=0.0)
    checkpoint = SparseCheckpoint(tmp_path, window=2, popularity=look)
    has_state: list[bool] = []

    class Adding(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
            assert checkpoint._run is not None
            session = checkpoint._run.session
            memory = session._run.capture.memory if session.is_open else None
            if trainer.global_step == 9:
                trainer.optimizers[0].add_param_group({"params": [pl_module.late]})
            if memory is not None and memory.layout is not None:
                names = {name for step in memory.layout.steps for name in step.durable.segment.spans}
                has_state.append("full/late/0+3/exp_avg" in names)

    fit(Adding(), checkpoint, net=Late())
    assert has_state == sorted(has_state)
    assert set(has_state) == {False, True}
