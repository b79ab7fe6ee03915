"""Memory belongs to one place and one past: copies, moved backups and squatters neither get it nor are taken for it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from stored._outages import stop_storing_after
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_moe_ckpt.callbacks import DenseCheckpoint
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.storage import Resume

PATIENCE_SECONDS = 20.0


class Ledger(LightningModule):
    """Each step of a life adds what the life is worth to a parameter, so that its value tells the whole past."""

    def __init__(self, worth: float) -> None:
        super().__init__()
        self.total, self.worth = nn.Parameter(torch.zeros(8)), worth

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return -self.worth * self.total.sum()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1.0)


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a life left as its word."""

    began_at: int
    total: float
    """Of the past that it began from."""
    warnings: list[str]


@dataclass(kw_only=True, eq=False)
class Witness(Callback):
    """Writes down what a life begins from, and ends it by SIGKILL when memory and storage have the step it is in."""

    place: Path
    kill_at: int | None
    """`None`: it trains to the end."""

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        path = beside(self.place, "said")
        if not path.exists():
            assert isinstance(pl_module, Ledger)
            path.write_text(json.dumps([trainer.global_step, pl_module.total[0].item()]))

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (checkpoint,) = (callback for callback in trainer.callbacks if isinstance(callback, DenseCheckpoint))  # type: ignore[attr-defined]
        assert checkpoint._run is not None
        assert checkpoint._run.session.drain(PATIENCE_SECONDS)
        if trainer.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def beside(place: Path, what: str) -> Path:
    """A file that is not copied with the checkpoints."""
    return place.with_name(f"{place.name}.{what}")


@dataclass(frozen=True, kw_only=True)
class Site:
    """A machine, and where what its lives say is collected."""

    memory: Path

    def live(
        self,
        place: Path,
        worth: float,
        *,
        kill_at: int | None,
        stored: int = 10**9,
        until: int = 99,
        resume: Resume = "auto",
    ) -> Said:
        """A life in a process of its own.

        Args:
            place: of the checkpoints.
            worth: of each of its steps.
            kill_at: step in which it is killed.
            stored: nothing is stored of steps beyond.
            until: last step, if it is not killed.
            resume: as the callback's.
        """
        beside(place, "said").unlink(missing_ok=True)
        beside(place, "warned").unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            self._live(place, worth, kill_at=kill_at, stored=stored, until=until, resume=resume)
        _, status = os.waitpid(child, 0)
        wanted = signal.SIGKILL if kill_at is not None else 0
        assert os.waitstatus_to_exitcode(status) == -wanted, beside(place, "failed").read_text()
        began_at, total = json.loads(beside(place, "said").read_text())
        return Said(began_at=began_at, total=total, warnings=json.loads(beside(place, "warned").read_text()))

    def fail(self, place: Path) -> str:
        """What a life says that cannot begin."""
        child = os.fork()
        if child == 0:
            self._live(place, 1, kill_at=None, stored=0, until=1, resume="auto")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        return beside(place, "failed").read_text()

    def _live(self, place: Path, worth: float, *, kill_at: int | None, stored: int, until: int, resume: Resume) -> None:
        try:
            warned = Warned(beside(place, "warned"))
            logging.getLogger("lightning_moe_ckpt").addHandler(warned)
            stop_storing_after(stored)
            witness = Witness(place=place, kill_at=kill_at)
            checkpoint = DenseCheckpoint(place, every_n_steps=1, keep=3, resume=resume)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Lightning's advice about this tiny run
                Trainer(
                    accelerator="cpu", devices=1, max_steps=until, max_epochs=-1, logger=False, enable_progress_bar=False,
                    enable_model_summary=False, callbacks=[witness, checkpoint],
                ).fit(Ledger(worth), DataLoader(TensorDataset(torch.ones(50, 1))))  # fmt: skip
        except BaseException:  # noqa: BLE001  # the end of a process
            beside(place, "failed").write_text(traceback.format_exc())
            os._exit(1)
        os._exit(0)


class Warned(logging.Handler):
    """Keeps warnings in a file, which a kill leaves."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._path, self._lines = path, list[str]()
        self._path.write_text("[]")

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())
        self._path.write_text(json.dumps(self._lines))


@pytest.fixture
def site(shared_memory: Path) -> Iterator[Site]:
    yield Site(memory=shared_memory)
    for path in shared_memory.iterdir():
        path.unlink()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_copied_directory_goes_on_from_what_it_has_itself(site: Site, tmp_path: Path) -> None:
    """`cp -r A B`; A trains on and is killed with more in memory than in storage. B gets nothing of it, and A all."""
    a, b = tmp_path / "a", tmp_path / "b"
    site.live(a, 1, kill_at=4, stored=4)
    shutil.copytree(a, b)
    assert site.live(a, 10, kill_at=8, stored=6).began_at == 4
    memory = names(site.memory)
    copied = site.live(b, 100, kill_at=7, stored=5)
    assert (copied.began_at, copied.total) == (4, 4)
    assert sum("has step 8 (incarnation 2) of this run" in line for line in copied.warnings) == 1
    assert memory <= names(site.memory)
    went_on = site.live(a, 1000, kill_at=None, until=9)
    assert (went_on.began_at, went_on.total) == (8, 4 + 40)
    copy_went_on = site.live(b, 1000, kill_at=None, until=9)
    assert (copy_went_on.began_at, copy_went_on.total) == (7, 4 + 300)
    assert names(site.memory) == set()


def test_a_moved_directory_says_what_memory_it_left(site: Site, tmp_path: Path) -> None:
    """It goes on from what it has itself; where it was, it would have gone on from memory."""
    a, b = tmp_path / "a", tmp_path / "b"
    site.live(a, 1, kill_at=8, stored=4)
    (ring,) = site.memory.glob("*.ring")
    a.rename(b)
    moved = site.live(b, 10, kill_at=7, stored=4)
    assert (moved.began_at, moved.total) == (4, 4)
    (warning,) = [line for line in moved.warnings if "of this run" in line]
    assert warning.startswith(
        f"{ring} has step 8 (incarnation 1) of this run, taken while it was stored elsewhere than at file://{b}"
    )
    b.rename(a)
    back = site.live(a, 100, kill_at=None, until=9)
    assert (back.began_at, back.total) == (4, 4)


def test_a_backup_that_was_put_back_is_followed_and_memory_is_offered(site: Site, tmp_path: Path) -> None:
    """The life of the backup is the one that memory is of; what tells them apart is what memory knew to be stored."""
    place, backup = tmp_path / "run", tmp_path / "backup"
    site.live(place, 1, kill_at=3, stored=3)
    first = site.live(place, 10, kill_at=5, stored=5)
    shutil.copytree(place, backup)
    site.live(place, 100, kill_at=9, stored=8)
    shutil.rmtree(place)
    shutil.copytree(backup, place)
    offered = site.live(place, 1000, kill_at=7, stored=5)
    assert (first.began_at, offered.began_at, offered.total) == (3, 5, 23)
    (warning,) = [line for line in offered.warnings if "another past" in line]
    assert "memory has step 9" in warning
    assert "The newest there is step 5" in warning
    assert "resume='memory'" in warning
    taken = site.live(place, 1, kill_at=10, stored=5, resume="memory")
    assert (taken.began_at, taken.total) == (9, 3 + 20 + 400)
    again = site.live(place, 1, kill_at=None, until=11)
    assert (again.began_at, again.total) == (10, 3 + 20 + 400 + 1)
    assert not [line for line in again.warnings if "another past" in line]


def test_a_backup_of_the_life_that_memory_is_of_is_followed_too(site: Site, tmp_path: Path) -> None:
    """Taken while it ran: the log names it, and lacks what it knew to be committed."""
    place = tmp_path / "run"
    site.live(place, 1, kill_at=9, stored=8)
    for folder in place.glob("snap/*"):
        if int(folder.name) > 6:
            shutil.rmtree(folder)
    went_on = site.live(place, 10, kill_at=None, until=8)
    assert (went_on.began_at, went_on.total) == (6, 6)
    assert [line for line in went_on.warnings if "storage had step" in line]


def test_memory_ahead_of_slow_storage_is_taken_without_a_word(site: Site, tmp_path: Path) -> None:
    """Many steps ahead, over two lives."""
    place = tmp_path / "run"
    site.live(place, 1, kill_at=9, stored=2)
    second = site.live(place, 10, kill_at=15, stored=2)
    third = site.live(place, 100, kill_at=None, until=16)
    assert [(each.began_at, each.total) for each in (second, third)] == [(9, 9), (15, 69)]
    assert not [line for line in second.warnings + third.warnings if "another past" in line]


def test_names_of_memory_cannot_be_guessed_and_squatted_ones_stop_nobody(site: Site, tmp_path: Path) -> None:
    """Somebody who saw them in an earlier life makes directories, links and pipes of the next ones' names."""
    place = tmp_path / "run"
    site.live(place, 1, kill_at=3, stored=3)
    log = "".join(path.read_text() for path in (place / "_log").iterdir())
    run_id = json.loads(log.splitlines()[0])["document"]["body"]["history"]["run_id"]
    (ring,) = site.memory.glob("*.ring")
    assert run_id not in ring.name
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in site.memory.iterdir())
    for path in site.memory.iterdir():
        path.unlink()
    os.mkfifo(ring)
    (ring.with_name(ring.name.replace(".ring", ".1.ring"))).symlink_to(beside(place, "said"))
    os.mkfifo(f"{ring}.5.i2.done")
    second = site.live(place, 10, kill_at=6, stored=5)
    assert second.began_at == 3
    assert site.live(place, 10, kill_at=None, until=7).began_at == 6
    assert names(site.memory) == {ring.name, ring.name.replace(".ring", ".1.ring"), f"{ring.name}.5.i2.done"}


def test_a_lost_log_is_repaired_and_the_run_goes_on(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` refuses, whatever is in memory; a repair is shown, then made, also of a manifest that was damaged too.

    A job that begins from nothing says so.
    """
    place = tmp_path / "run"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert not site.live(place, 1, kill_at=5, stored=4).warnings
    (manifest,) = place.glob("snap/*4/*/_COMMITTED")
    assert json.loads(manifest.read_bytes())["document"]["body"]["lineage"]["cuts"][0]["step"] is None
    manifest.write_bytes(manifest.read_bytes()[1:])
    shutil.rmtree(place / "_log")
    refused = site.fail(place)
    assert "no log" in refused
    assert "moe-ckpt repair" in refused
    assert main(["repair", str(place)]) == 0
    assert "nothing is written yet" in capsys.readouterr().out
    assert main(["repair", str(place), "--yes", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["written"], shown["mended"]) == (True, [{"step": 4, "incarnation": 1}])
    assert main(["repair", str(place), "--yes"]) == 2
    went_on = site.live(place, 10, kill_at=None, until=6)
    assert (went_on.began_at, went_on.total) == (4, 4)
    (warning,) = [line for line in went_on.warnings if "of this run" in line]
    assert "has step 5 (incarnation 1) of this run, from before its log was repaired" in warning
    shutil.rmtree(place / "snap")
    assert "none of them is there" in site.fail(place)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    (warning,) = site.live(place, 10, kill_at=None, until=2, resume="never").warnings
    assert "TORCHELASTIC_RESTART_COUNT=2" in warning
