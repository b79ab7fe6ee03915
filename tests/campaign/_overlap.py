"""Two starts of one job at once: the first falls asleep in mid-operation, the second takes over, then the first wakes up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from door import Fit, free_port, settle
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from campaign._training import Setup
from lightning_moe_ckpt.storage import _posix
from lightning_moe_ckpt.testing import Attempt, AttemptResult, Kill, Seam
from lightning_moe_ckpt.testing._attempts import _fork_rank, _RunningAttempt, _Script


class Patient(Callback):
    """Lets every generation become durable, so that the n-th operation on storage is the same one in every run."""

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        settle(trainer, 60.0)


@dataclass(frozen=True, kw_only=True)
class PatientSetup(Setup):
    """A training that waits for storage after every step."""

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        return [Patient(), *super().callbacks(life)]


class SleepingLife(_RunningAttempt):
    """A life of which one rank stops itself, by SIGSTOP, where its script says; then all of it stands still."""

    def fall_asleep(self) -> None:
        """Start, and return when no process of the life runs any more."""
        self._deadline = time.monotonic() + self._script.timeout
        port = free_port()
        for life in self._attempts:
            self._pids[life.rank] = _fork_rank(self._script, life, port)
        self._await(lambda: any(map(_stands_still, self._pids.values())))
        for pid in self._pids.values():
            os.killpg(pid, signal.SIGSTOP)
        self._await(lambda: all(map(_stands_still, self._pids.values())))

    def wake_up(self) -> None:
        """Let it go on as if nothing had happened."""
        for pid in self._pids.values():
            os.killpg(pid, signal.SIGCONT)

    def end(self) -> AttemptResult:
        """Wait until all ranks have ended by themselves."""
        self._wait(self._deadline)
        return AttemptResult(
            index=self._index,
            outcome="stopped" if any(self._codes.values()) else "finished",
            seconds=0.0,
            world_size=self._script.world_size,
            workdir=self._script.workdir,
            exit_codes=dict(self._codes),
        )

    def leave_nothing(self) -> None:
        """End whatever is left of it."""
        self._kill_all()

    def _await(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._reap(os.WNOHANG)
            if self._codes or time.monotonic() > self._deadline:
                raise self._failed(f"did not fall asleep; exit codes by rank: {self._codes}")
            time.sleep(0.002)


def _stands_still(pid: int) -> bool:
    """Whether a process is stopped; its state stands behind its name, which may contain anything."""
    state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    return state in {"T", "t"}


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Where the first start falls asleep, and where the second is when the first wakes up."""

    asleep_at: Kill | None
    """`None`: where the seam says."""
    seams: Sequence[Seam] = ()
    lose: str = ""
    """Pattern of files below the checkpoints to remove while the first sleeps."""


SECOND_HAS_COMMITTED = Kill(
    phase="storage", verb=r"^create .*/i000002[^/]*/_COMMITTED", operation=1, after=True, signal=signal.SIGSTOP
)


def run_overlapping(fit: Fit, overlap: Overlap, *, url: str, workdir: Path, world_size: int) -> list[AttemptResult]:
    """The first start falls asleep, the second commits twice; then both go on at once.

    Returns:
        How the first ended, and the second.

    Raises:
        AttemptFailed: one of them did not get to its place, or did not end.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    script = _Script(fit=fit, url=url, workdir=workdir, world_size=world_size, timeout=60.0, seams=tuple(overlap.seams))
    first = SleepingLife(script, 0, overlap.asleep_at)
    second = SleepingLife(replace(script, seams=()), 1, SECOND_HAS_COMMITTED)
    try:
        first.fall_asleep()
        for path in workdir.glob(overlap.lose) if overlap.lose else ():
            path.unlink(missing_ok=True)
        second.fall_asleep()
        first.wake_up()
        second.wake_up()
        return [first.end(), second.end()]
    finally:
        first.leave_nothing()
        second.leave_nothing()


_write_all = _posix._write_all


def half_written(name: str, descriptor: int, views: Sequence[bytes | memoryview], *more: Any) -> None:
    """In place of the function that writes files: falls asleep with half of the file `name` written."""
    path = Path(f"/proc/self/fd/{descriptor}").readlink()
    if not path.name.startswith(f"{name}."):
        _write_all(descriptor, views, *more)
        return
    view = memoryview(b"".join(views))
    _write_all(descriptor, [view[: len(view) // 2]], *more)
    if name not in _slept:  # the write is tried again when the successor has removed the file, and nobody wakes it then
        _slept.add(name)
        os.kill(os.getpid(), signal.SIGSTOP)
    _write_all(descriptor, [view[len(view) // 2 :]], *more)


_slept: set[str] = set()
"""Files in the middle of which this process has slept."""


def in_mid_file(name: str) -> Seam:
    """Falls asleep in the middle of the file that is called so."""
    return Seam(
        module="lightning_moe_ckpt.storage._posix", attribute="_write_all", replacement=partial(half_written, name)
    )
