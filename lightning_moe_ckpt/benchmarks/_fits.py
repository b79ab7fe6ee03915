"""What all trainings that are measured have in common, and processes of which only the one whose turn it is runs.

Two things that are measured one after the other meet different machines when others use it too. Taking turns of a few
seconds they meet nearly the same one, and neither has to start anew for every turn.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from lightning.pytorch import Trainer
from typing_extensions import Self

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.strategy import MoEStrategy
from lightning_moe_ckpt.tiers import shared_directory

_ADVICE = (
    r".*does not have many workers.*",
    r".*assuming the intent is to (save|load) in a single process.*",
    r".*your dataloader is not resumable.*",
    r".*isinstance\(treespec, LeafSpec\).*",
)


def own_memory(folder: str | Path, *, lost: bool) -> None:
    """Make `folder`, on a tmpfs, the shared memory of this process, as that of its node; empty if it was `lost`."""
    if lost:
        shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir(parents=True, exist_ok=True)
    os.environ["MOE_CKPT_SHARED_MEMORY"] = str(folder)


class Lines:
    """A file to which lives append JSON, each line with one `write`, so that they outlive a SIGKILL."""

    def __init__(self, path: str | Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def write(self, what: str, **values: Any) -> None:
        """Append a line of this kind."""
        os.write(self._file, (json.dumps({"what": what, **values}) + "\n").encode())

    @staticmethod
    def read(path: str | Path, *kinds: str) -> list[dict[str, Any]]:
        """The lines of all lives so far, in the order in which they were written; of some kinds only."""
        text = Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""
        return [line for line in map(json.loads, text.splitlines()) if line["what"] in kinds]


def bench_trainer(**options: Any) -> Trainer:
    """A Trainer without loggers and bars, with clipped gradients; `options` come on top."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(**{"devices": 1, "strategy": MoEStrategy(), "gradient_clip_val": 1.0, **quiet, **options})


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch with one thread: copies and digests run beside training, as they do where training has a device."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Lines about devices, and advice on loaders and on other checkpoints, would bury the table."""
    with at_level("lightning.pytorch", logging.WARNING), warnings.catch_warnings():
        for message in _ADVICE:
            warnings.filterwarnings("ignore", message=message)
        yield


@contextmanager
def at_level(name: str, level: int) -> Iterator[None]:
    """The logger `name` with another level."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def bench_folders(parent: Path | None = None) -> Iterator[tuple[Path, Path]]:
    """A folder for checkpoints and one on the tmpfs, both gone afterwards, whatever killed processes left there."""
    with (
        tempfile.TemporaryDirectory(prefix="moe-ckpt-bench-", dir=parent) as folder,
        tempfile.TemporaryDirectory(prefix="moe-ckpt-bench-", dir=shared_directory()) as memory,
    ):
        yield Path(folder), Path(memory)


Result = TypeVar("Result")
HandOver = Callable[[Result], None]
"""Ends a turn with its result and returns when the next one begins; raises `EOFError` if there is none."""

_FORK = multiprocessing.get_context("fork")
_PATIENCE = timedelta(seconds=60)
"""For a process to leave by itself, which removes its shared memory."""


class TurnFailed(RuntimeError):
    """The work raised, ended early or was too late; the message holds its traceback."""


class TurnTaker(Generic[Result]):
    """A process that does `work` in turns. Forked at once, so make it before anything has started threads.

    Args:
        work: gets what it calls at the end of every turn.
        timeout: limit for one turn.
    """

    def __init__(self, work: Callable[[HandOver[Result]], None], timeout: timedelta = timedelta(minutes=10)) -> None:
        self._timeout, self._patience = timeout, _PATIENCE
        self._pipe, child = _FORK.Pipe()
        self._process = _FORK.Process(target=_serve, args=(work, child, self._pipe), daemon=True)
        self._process.start()
        child.close()  # else the end of the process would not be seen as the end of the pipe

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """No more turns: wait for the process to clean up, then end it. The one made last goes first.

        (Those made later have inherited this end of the pipe, and only when nobody has it open does the other end.)
        """
        self._pipe.close()
        self._process.join(self._patience.total_seconds())
        self.kill()

    def kill(self) -> None:
        """End it by SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.join()

    def take(self) -> Result:
        """Let it have one turn.

        Raises:
            CheckpointError: the work did.
            TurnFailed: the work raised something else, ended early or was too late.
        """
        try:
            self._pipe.send_bytes(b"go")
            if not self._pipe.poll(self._timeout.total_seconds()):
                self._patience = timedelta(0)
                raise TurnFailed(f"a turn is not over after {self._timeout}")
            error, result = self._pipe.recv()
        except (EOFError, BrokenPipeError) as ended:
            raise TurnFailed("the process ended before its turn was over") from ended
        if error is not None:
            raise error
        return cast("Result", result)


def _serve(work: Callable[[HandOver[Result]], None], pipe: Connection, other_end: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    other_end.close()  # inherited: while it is open here, the parent closing its own goes unseen

    def hand_over(result: Result) -> None:
        pipe.send((None, result))
        pipe.recv_bytes()

    try:
        with suppress(EOFError, BrokenPipeError):  # no more turns; the parent sees our end if it expected one
            pipe.recv_bytes()
            work(hand_over)
    except CheckpointError as error:
        pipe.send((CheckpointError(str(error)), None))
    except BaseException:  # noqa: BLE001  # process entry: the parent reports it
        pipe.send((TurnFailed(traceback.format_exc()), None))
