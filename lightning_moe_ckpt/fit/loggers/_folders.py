"""Keep one log folder with each row once, in a run that is killed and resumed.

A resumed run trains some steps again and would log them again; and Lightning gives every process a new log folder, or,
if the folder is fixed, `CSVLogger` deletes earlier processes' rows. So the step journal names the run's folder; a
resumed run goes on there, reads existing rows, and drops rows that it would write a second time. Existing rows come
from steps that are trained again bit for bit, so their values are the same.

This holds for `CSVLogger` and `TensorBoardLogger` on a local disk; for `WandbLogger` and `MLFlowLogger` see `_once`.
Files are flushed after every row, by Lightning for the trainer's rows and here, before each boundary, for all others; a
SIGKILL loses no flushed rows. Other loggers get rows of repeated steps a second time.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.fit.loggers._once import LineCounts, LoggedOnce, remote_log

log = rank_logger(__name__)

KEPT = "metrics.kept.csv"
"""Second name (hard link) of a `metrics.csv`; it stays when a starting `CSVLogger` deletes the first name."""


class LogFolders:
    """Continue the run's log files in one trainer, from `on_fit_start`, before a row is written, until `remove`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        owner = trainer.is_global_zero
        found = [_log_of(logger, owner=owner) for logger in trainer.loggers]
        self._logs = [each for each in found if each is not None]

    def take(self) -> dict[str, Any]:
        """Return the folders, and counts of keys logged under the newest step."""
        return {"logs": [log.take() for log in self._logs]}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue in the folders of the run."""
        if len(state["logs"]) != len(self._logs):
            log.warning("this run has other loggers than before: rows of steps that are trained again appear twice")
            return
        for each, taken in zip(self._logs, state["logs"], strict=True):
            each.restore(taken)

    def start(self) -> dict[str, Any]:
        """Return the folders, as of before the first row."""
        return {"logs": [log.start() for log in self._logs]}

    def hold(self) -> list[Callable[[], None]]:
        """Return functions to call if all rows from now on will be logged again."""
        return [log.hold() for log in self._logs]

    def follow(self, state: dict[str, Any]) -> None:
        """Do nothing: rows are dropped by name and step, whatever values replay gives them."""

    def remove(self) -> None:
        """Restore the loggers' own methods."""
        for log in self._logs:
            log.remove()


def _log_of(logger: Logger, *, owner: bool) -> LoggedOnce | None:
    if isinstance(logger, CSVLogger | TensorBoardLogger):
        return _FolderLog(logger, owner=owner)
    return remote_log(logger, owner=owner)


class _FolderLog(LoggedOnce):
    """One logger's rows in its folder."""

    _logger: CSVLogger | TensorBoardLogger

    def __init__(self, logger: CSVLogger | TensorBoardLogger, *, owner: bool) -> None:
        super().__init__(logger, owner=owner)
        self._unsaved = False
        self._kept: Path | None = None
        self._save = logger.save
        logger.save = self._save_and_keep  # type: ignore[method-assign]

    @override
    def take(self) -> dict[str, Any]:
        if (
            self._unsaved
        ):  # by a callback that gives rows to the logger itself; a run that goes on from here will not again
            self._logger.save()
        return {"version": self._logger.version, "step": self.newest["step"], "keys": dict(self.newest["keys"])}

    @override
    def start(self) -> dict[str, Any]:
        return {"version": self._logger.version, "step": -1, "keys": {}}

    @override
    def restore(self, taken: Mapping[str, Any]) -> None:
        logger, before = self._logger, Path(self._logger.log_dir)
        self.go_on_behind(taken)
        moves = logger.version != taken["version"]
        if moves and self._owner and logger._experiment is not None:
            _leave(logger, before)
        logger._version = taken["version"]
        if not self._owner:
            return
        folder = Path(logger.log_dir)
        self.there = _go_on_csv(logger, folder) if isinstance(logger, CSVLogger) else _events_in(folder)
        # Rows logged under this step before the boundary will not be logged again.
        self.there.subtract({(taken["step"], key): number for key, number in taken["keys"].items()})
        log.info("log rows go on in %s; it has rows up to step %d", folder, max((s for s, _ in self.there), default=-1))

    @override
    def remove(self) -> None:
        super().remove()
        self._logger.__dict__.pop("save", None)

    @override
    def _log_once(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        before, self.has_logged = self.has_logged, False
        super()._log_once(metrics, step)
        self._unsaved |= self.has_logged
        self.has_logged |= before

    def _save_and_keep(self) -> None:
        self._save()
        self._unsaved = False
        if not isinstance(self._logger, CSVLogger):
            return
        folder = Path(self._logger.log_dir)
        if self._owner and self._kept is None and (folder / "metrics.csv").is_file():
            self._kept = folder / KEPT
            _keep(folder)


def _leave(logger: CSVLogger | TensorBoardLogger, folder: Path) -> None:
    """Close the folder that Lightning made for this process, and remove it if empty."""
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.close()
        for path in folder.glob(f"events.out.tfevents.*.{os.getpid()}.*"):
            path.unlink()
    logger._experiment = None
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _keep(folder: Path) -> None:
    """Make the second name of `metrics.csv`."""
    (folder / KEPT).unlink(missing_ok=True)
    try:
        os.link(folder / "metrics.csv", folder / KEPT)
    except OSError as error:
        log.warning("rows in %s will be lost when this run resumes in the same folder: %s", folder, error)


def _go_on_csv(logger: CSVLogger, folder: Path) -> LineCounts:
    """Let the logger append to the rows of earlier processes, and return their counts."""
    path, kept = folder / "metrics.csv", folder / KEPT
    if path.is_file():
        _keep(folder)  # opening the folder deletes the file
    logger._experiment = None
    writer: Any = logger.experiment
    writer._rewrite_with_new_header = lambda names: _rewrite(folder, names)
    if not kept.is_file():
        return Counter()
    _cut_torn_row(kept)
    kept.replace(path)
    _keep(folder)
    names, rows = _read(path)
    writer.metrics_keys = names
    return Counter((int(row["step"]), name) for row in rows for name in names if name != "step" and row[name])


def _cut_torn_row(path: Path) -> None:
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(whole)
        temporary.replace(path)


def _rewrite(folder: Path, names: list[str]) -> None:
    """Add columns to the table, as Lightning does, but atomically: a kill must not lose the file."""
    path = folder / "metrics.csv"
    _, rows = _read(path)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, fieldnames=names)
        table.writeheader()
        table.writerows(rows)
    temporary.replace(path)
    _keep(folder)


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    with path.open(newline="", encoding="utf-8") as file:
        table = csv.DictReader(file)
        return list(table.fieldnames or []), list(table)


def _events_in(folder: Path) -> LineCounts:
    """Count the scalars in the event files of a folder, which may end anywhere."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    except ImportError:
        log.warning("without the package tensorboard, %s cannot be read: some rows may appear twice", folder)
        return Counter()
    loader: Callable[[str], Any] = EventFileLoader
    return Counter(
        (event.step, value.tag)
        for path in sorted(folder.glob("events.out.tfevents.*"))
        for event in loader(str(path)).Load()
        for value in event.summary.value
    )
