"""Ends of a fit in one process: handlers, exceptions, and what a later fit makes of them."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from door import CheckpointCallback
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.errors import ConfigurationError, StorageRefused
from lightning_moe_ckpt.inspection import verify
from lightning_moe_ckpt.storage import PosixBackend, open_backend

FEATURES = 4
STOPPED = 143


class Small(tiny.ToZero):
    """Two layers with dropout, and a value that is logged."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("loss", 1.0)
        return super().training_step(batch, batch_idx)


class At(Callback):
    """Does something once, when a step has been taken."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step == self.step:
            self.action()


def make(*callbacks: Callback, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", devices=1, callbacks=list(callbacks), **{"max_epochs": 2, **quiet, **options})


def fit(trainer: Trainer, module: LightningModule | None = None) -> Small:
    """Train on 6 batches per epoch."""
    module = module if module is not None else Small()
    data = TensorDataset(torch.arange(24.0).view(6, FEATURES) / 24)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about this tiny run
        trainer.fit(module, DataLoader(data, batch_size=1, shuffle=True))
    return module  # type: ignore[return-value]


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Every test leaves threads, handlers and the wakeup descriptor as they were."""
    threads, handler = set(threading.enumerate()), signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not [t.name for t in threading.enumerate() if t not in threads and t.name.startswith("moe-ckpt")]
    assert signal.set_wakeup_fd(-1) == -1


def test_sigterm_raises_lightnings_exception_with_a_status(tmp_path: Path) -> None:
    """User code that catches it works as before; uncaught, it ends the process with 143 instead of 0."""
    with pytest.raises(SIGTERMException) as raised:
        fit(make(DenseCheckpoint(str(tmp_path)), At(3, terminate)))
    assert raised.value.code == STOPPED
    again = DenseCheckpoint(str(tmp_path))
    fit(make(again))
    assert (again.report.resumed_from, again.report.steps) == (3, 9)


def test_a_handler_the_user_had_installed_is_called_too(tmp_path: Path) -> None:
    """Before ours, as under Lightning; and it is back when fit has ended."""
    called: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    try:
        own = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SIGTERMException):
            fit(make(DenseCheckpoint(str(tmp_path)), At(3, terminate)))
        assert called == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_same_trainer_fits_again_after_an_exception(tmp_path: Path) -> None:
    """Whatever its loops were in the middle of; the end is that of a run that met no exception."""

    def boom() -> None:
        raise KeyError("of the user")

    seed_everything(1, verbose=False)
    undisturbed = fit(make(DenseCheckpoint(str(tmp_path / "calm"), every_n_steps=2)))
    seed_everything(1, verbose=False)
    checkpoint = DenseCheckpoint(str(tmp_path / "run"), every_n_steps=2)
    once = At(8, boom)
    wait = [At(step, lambda: checkpoint.wait_committed(20)) for step in (5, 7)]
    trainer = make(checkpoint, once, *wait)
    with pytest.raises(KeyError, match="of the user"):
        fit(trainer)
    once.step = -1
    resumed = fit(trainer)
    assert 0 < (checkpoint.report.resumed_from or 0) < 8
    for want, got in zip(undisturbed.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(want, got)


def test_an_exception_comes_out_even_if_checkpointing_cannot_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The user looks for their own mistake, not for ours."""

    def boom() -> None:
        raise KeyError("of the user")

    close = DenseCheckpoint._close

    def failing(self: DenseCheckpoint, trainer: Trainer, **options: bool) -> None:
        close(self, trainer, **options)
        raise OSError("the disk is gone")

    monkeypatch.setattr(DenseCheckpoint, "_close", failing)
    with pytest.raises(KeyError, match="of the user"):
        fit(make(DenseCheckpoint(str(tmp_path)), At(3, boom)))
    assert "did not end cleanly" in caplog.text


def _impatient() -> Callback:
    return EarlyStopping("loss", patience=2, check_on_train_epoch_end=True)


def test_a_run_that_was_stopped_early_stays_stopped(tmp_path: Path) -> None:
    """Early stopping is a normal end; starting again trains nothing."""
    first = DenseCheckpoint(str(tmp_path))
    fit(make(first, _impatient(), max_epochs=10))
    assert first.report.steps == 18, "three epochs without getting better"
    second = DenseCheckpoint(str(tmp_path))
    fit(make(second, _impatient(), max_epochs=10))
    assert (second.report.resumed_from, second.report.steps) == (18, 0)


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("policy", [partial(DenseCheckpoint, every_n_steps=1), partial(SparseCheckpoint, window=2)])
def test_a_stop_in_the_middle_of_an_accumulation_leaves_what_its_boundary_has_given(
    policy: Callable[[str], CheckpointCallback], step: int, tmp_path: Path
) -> None:
    """The generation of the boundary before it is stored already: another one of that name would take its files."""

    class Stop(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, i: int
        ) -> None:
            assert checkpoint.wait_committed()
            trainer.should_stop = trainer.should_stop or (trainer.global_step == step and i % 3 == 1)

    for stored, stop in ((tmp_path / "whole", ()), (tmp_path / "stopped", (Stop(),)), (tmp_path / "stopped", ())):
        seed_everything(1, verbose=False)
        checkpoint = policy(str(stored))
        trainer = make(*stop, checkpoint, accumulate_grad_batches=3, min_epochs=0)
        module = fit(trainer, Small())
        assert verify(open_backend(str(stored))).sound
        assert checkpoint.report.resumed_from == (step if stored.name == "stopped" and not stop else None)
        if stop:
            assert trainer.global_step == step
        elif stored.name == "whole":
            whole = module
    for name, value in whole.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


def test_an_end_in_the_middle_of_an_accumulation_that_loses_batches_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No generation of the step before it was taken; one that ends with a step says nothing."""

    class Stop(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, i: int
        ) -> None:
            trainer.should_stop = trainer.should_stop or (trainer.global_step, i) == (1, stop_at)

    for stop_at, said in ((2, 0), (3, 1)):
        caplog.clear()
        trainer = make(
            Stop(),
            DenseCheckpoint(str(tmp_path / str(stop_at)), every_n_steps=5),
            accumulate_grad_batches=3,
            min_epochs=0,
        )
        fit(trainer, Small())
        assert trainer.global_step == 1
        told = [record.getMessage() for record in caplog.records if "middle of an accumulation" in record.getMessage()]
        assert len(told) == said


def test_an_end_before_the_resumed_state_is_whole_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such a module must not be used; nothing that is stored changes, and a longer fit ends as if nothing had been."""

    def boom() -> None:
        raise KeyError("of the user")

    def sparse(name: str) -> SparseCheckpoint:
        return SparseCheckpoint(str(tmp_path / name), window=3)

    seed_everything(1, verbose=False)
    undisturbed = fit(make(sparse("calm")))
    seed_everything(1, verbose=False)
    first = sparse("run")
    with pytest.raises(KeyError, match="of the user"):
        fit(make(first, At(5, lambda: first.wait_committed(20)), At(8, boom)))
    short = sparse("run")
    fit(make(short, max_steps=5))
    assert short.report.resumed_from == 6
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 1
    assert "ends at step 5, before step 6" in told[0]
    caplog.clear()
    last = sparse("run")
    resumed = fit(make(last))
    assert last.report.resumed_from == 6
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    for want, got in zip(undisturbed.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(want, got)


def test_a_run_that_is_given_more_time_goes_on(tmp_path: Path) -> None:
    """Running out of time is a normal end too, but not for good."""
    timer = Timer(timedelta(hours=1))
    first = DenseCheckpoint(str(tmp_path))

    def run_out() -> None:
        timer._duration = 0.0

    fit(make(first, timer, At(4, run_out)))
    assert 4 <= first.report.steps <= 5
    second = DenseCheckpoint(str(tmp_path))
    fit(make(second, Timer(timedelta(hours=1))))
    assert second.report.resumed_from == first.report.steps
    assert first.report.steps + second.report.steps == 12


def test_a_stop_that_cannot_be_stored_leaves_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is committed is what the next start goes on from."""
    put = PosixBackend.put

    def failing(self: PosixBackend, key: str, *views: bytes | memoryview) -> None:
        if "000000000003" in key:
            raise StorageRefused("disk full, for this test")
        put(self, key, *views)

    monkeypatch.setattr(PosixBackend, "put", failing)
    with pytest.raises(SIGTERMException):
        fit(make(DenseCheckpoint(str(tmp_path)), At(3, terminate)))
    assert "the last step, 3, was not stored" in caplog.text
    assert "disk full" in caplog.text
    again = DenseCheckpoint(str(tmp_path))
    fit(make(again))
    assert again.report.resumed_from == 0


def test_a_child_that_is_ended_ends_alone(tmp_path: Path) -> None:
    """A process that a hook forks and terminates ends by that, while training waits for it, and does not stop."""
    ended: list[int] = []

    def fork_and_terminate() -> None:
        runs, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(told, b".")
            threading.Event().wait(1.0)  # one that does not listen ends all the same
            os._exit(1)
        assert os.read(runs, 1)
        os.kill(child, signal.SIGTERM)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    checkpoint = DenseCheckpoint(str(tmp_path))
    fit(make(checkpoint, At(3, fork_and_terminate)))
    assert (ended, checkpoint.report.steps) == ([-signal.SIGTERM], 12)


def test_a_negative_grace_is_refused(tmp_path: Path) -> None:
    """The error quotes it."""
    with pytest.raises(ConfigurationError, match="stop_grace"):
        DenseCheckpoint(str(tmp_path), stop_grace=timedelta(seconds=-1))
