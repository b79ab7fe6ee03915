"""Log each row once, in one place, although a resumed run repeats steps that an earlier process has logged.

*Folders.* Lightning gives every process a new log folder, or, if the folder is fixed, `CSVLogger` deletes earlier
processes' rows. So the step journal names the run's folder; a resumed run goes on there, reads existing rows, and drops
rows that it would write a second time. Existing rows come from steps that are trained again bit for bit, so their
values are the same. This holds for `CSVLogger` and `TensorBoardLogger` on a local disk. Files are flushed after every
row, by Lightning for the trainer's rows and here, before each boundary, for all others; a SIGKILL loses no flushed
rows. Loggers not named here get rows of repeated steps a second time.

*Services.* The journal names the run of Weights & Biases or MLflow, like the folder of other loggers, and a resumed
training goes on under that id. If Lightning has begun another run by then, to log hyperparameters, that run is left:
MLflow's is deleted, an offline run of Weights & Biases is removed, an online run is finished and stays empty.

MLflow can be asked for rows that a killed process logged beyond the resumed boundary. Weights & Biases cannot, at least
offline. So steps and names of rows are written to a small file beside its own, `moe-ckpt-rows-<id>.jsonl`, row by row.
A resumed training that does not find the file, as on another machine without a shared disk, logs these rows twice.
"""

from __future__ import annotations

import contextlib
import csv
import inspect
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger

log = rank_logger(__name__)

LineCounts: TypeAlias = "Counter[tuple[int, str]]"
"""Number of times that a key was logged under a step."""


class LoggedOnce:
    """Drop rows that one logger has already. The `owner` is the rank that writes; other ranks only count."""

    def __init__(self, logger: Any, *, owner: bool) -> None:
        self._logger, self._owner = logger, owner
        self.there: LineCounts = Counter()
        """Existing rows that will be logged again."""
        self.newest: dict[str, Any] = {"step": -1, "keys": {}}
        """Newest step of a row, and how often each key was logged under this step."""
        self.has_logged = False
        """Whether this process has logged a row."""
        self._log = logger.log_metrics
        logger.log_metrics = self._log_once

    def take(self) -> dict[str, Any]:
        """Return the rows' place, the newest step, and how often each key was logged under it."""
        raise NotImplementedError

    def restore(self, taken: Mapping[str, Any]) -> None:
        """Go on in the place of the run's rows."""
        raise NotImplementedError

    def start(self) -> dict[str, Any]:
        """Return the result of `take` for a logger that has no rows yet."""
        return {**self.take(), "step": -1, "keys": {}}

    def hold(self) -> Callable[[], None]:
        """Return a function to call if all rows from now on will be logged again, and are to be dropped then."""
        step, keys = self.newest["step"], dict(self.newest["keys"])

        def undo() -> None:
            since = Counter(self.newest["keys"])
            if self.newest["step"] == step:
                since.subtract(keys)
            self.there.update({(self.newest["step"], name): number for name, number in since.items()})
            self.newest = {"step": step, "keys": dict(keys)}

        return undo

    def remove(self) -> None:
        """Restore the logger's own methods."""
        self._logger.__dict__.pop("log_metrics", None)

    def wrote(self, step: int, names: Iterable[str]) -> None:
        """Note a row that the logger has got."""

    def go_on_behind(self, taken: Mapping[str, Any]) -> None:
        """Continue the counts of `taken`."""
        self.newest = {"step": taken["step"], "keys": dict(taken["keys"])}

    def name_of(self, key: str) -> str:
        """Return a key's name in the logger."""
        prefix = self._logger._prefix
        return f"{prefix}{self._logger.LOGGER_JOIN_CHAR}{key}" if prefix else key

    def _log_once(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if step is None:
            self._log(metrics, step)
            self.has_logged = True
            return
        if step != self.newest["step"]:
            self.newest = {"step": step, "keys": {}}
        if fresh := {key: value for key, value in metrics.items() if self._is_fresh(step, key)}:
            self._log(fresh, step)
            self.has_logged = True
            self.wrote(step, [self.name_of(key) for key in fresh])

    def _is_fresh(self, step: int, key: str) -> bool:
        name = self.name_of(key)
        self.newest["keys"][name] = self.newest["keys"].get(name, 0) + 1
        if self.there[step, name] > 0:
            self.there[step, name] -= 1
            return False
        return True


class RemoteLog(LoggedOnce):
    """Rows of a logger with a service; `owner` is the rank that writes them."""

    @property
    def run_id(self) -> str | None:
        """Id of the tracker's run; `None` before there is a run."""
        raise NotImplementedError

    @override
    def take(self) -> dict[str, Any]:
        newest = {"step": self.newest["step"], "keys": dict(self.newest["keys"])}
        return {"version": self.run_id if self._owner else None, **newest}

    @override
    def restore(self, taken: Mapping[str, Any]) -> None:
        self.go_on_behind(taken)
        run_id = taken["version"]
        if not self._owner or run_id is None:
            return
        if run_id != self.run_id:
            self._move_to(str(run_id))
        self.there = self._rows_of(str(run_id))
        # Rows logged under this step before the boundary will not be logged again.
        self.there.subtract({(taken["step"], key): number for key, number in taken["keys"].items()})
        log.info("rows go on in run %s of %s", run_id, type(self._logger).__name__)

    def _move_to(self, run_id: str) -> None:
        """Leave this process's own run, if any, and go on in another run."""
        raise NotImplementedError

    def _rows_of(self, run_id: str) -> LineCounts:
        """Return the run's rows."""
        raise NotImplementedError


class WandbLog(RemoteLog):
    """Rows of a `WandbLogger`."""

    _logger: WandbLogger

    @property
    @override
    def run_id(self) -> str | None:
        found: str | None = getattr(self._logger._experiment, "id", None) or self._logger._id
        return found

    @override
    def _move_to(self, run_id: str) -> None:
        logger, begun = self._logger, self._logger._experiment
        if begun is not None:
            folder = Path(begun.dir).parent
            begun.finish()
            if begun.offline and not self.has_logged:
                shutil.rmtree(folder, ignore_errors=True)
        logger._experiment, logger._id = None, run_id
        logger._wandb_init.update(id=run_id, resume="allow")

    @override
    def wrote(self, step: int, names: Iterable[str]) -> None:
        run_id = self.run_id
        if self._owner and run_id is not None:
            with self._file(run_id).open("a", encoding="utf-8") as file:
                file.write(json.dumps([step, *names]) + "\n")

    @override
    def _rows_of(self, run_id: str) -> LineCounts:
        rows: LineCounts = Counter()
        path = self._file(run_id)
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            with contextlib.suppress(ValueError):  # torn by the kill
                step, *names = json.loads(line)
                rows.update((int(step), name) for name in names)
        return rows

    def _file(self, run_id: str) -> Path:
        return Path(self._logger.save_dir or ".") / f"moe-ckpt-rows-{run_id}.jsonl"


class MLFlowLog(RemoteLog):
    """Rows of an `MLFlowLogger`."""

    _logger: MLFlowLogger

    @property
    @override
    def run_id(self) -> str | None:
        return self._logger._run_id

    @override
    def _move_to(self, run_id: str) -> None:
        logger = self._logger
        if logger._initialized and not self.has_logged:
            logger._mlflow_client.delete_run(logger._run_id)
        logger._run_id, logger._initialized = run_id, False
        logger._mlflow_client.update_run(run_id, status="RUNNING")

    @override
    def _rows_of(self, run_id: str) -> LineCounts:
        client = self._logger.experiment
        names = client.get_run(run_id).data.metrics
        return Counter((each.step, name) for name in names for each in client.get_metric_history(run_id, name))

    @override
    def name_of(self, key: str) -> str:
        return re.sub("[^a-zA-Z0-9_/. -]+", "", super().name_of(key))  # as the logger itself


KEPT = "metrics.kept.csv"
"""Second name (hard link) of a `metrics.csv`; it stays when a starting `CSVLogger` deletes the first name."""


class LogFolders:
    """Continue the run's log files in one trainer, from `on_fit_start`, before a row is written, until `remove`."""

    def __init__(self, trainer: Trainer, *, follows: bool = True) -> None:
        self._follows, owner = follows, trainer.is_global_zero
        found = [_log_of(logger, owner=owner) for logger in trainer.loggers if follows]
        self._logs = [each for each in found if each is not None]

    def take(self) -> dict[str, Any]:
        """Return the folders, and counts of keys logged under the newest step."""
        return {"logs": [log.take() for log in self._logs]}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue in the folders of the run."""
        if not self._follows:
            return
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
    if isinstance(logger, WandbLogger):
        return WandbLog(logger, owner=owner)
    return MLFlowLog(logger, owner=owner) if isinstance(logger, MLFlowLogger) else None


class _FolderLog(LoggedOnce):
    """A logger's rows in its folder."""

    _logger: CSVLogger | TensorBoardLogger

    def __init__(self, logger: CSVLogger | TensorBoardLogger, *, owner: bool) -> None:
        super().__init__(logger, owner=owner)
        self._unsaved = False
        self._kept: Path | None = None
        self._save = logger.save
        logger.save = self._save_and_keep  # type: ignore[method-assign]

    @override
    def take(self) -> dict[str, Any]:
        # by a callback that gives rows to the logger itself; a run that goes on from here will not again
        if self._unsaved:
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
    """Give `metrics.csv` a second name, under which a later process finds the rows; warn if the file system has no links."""
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
    content = kept.read_bytes()
    if (whole := content[: content.rfind(b"\n") + 1]) != content:
        temporary = kept.with_suffix(".tmp")
        temporary.write_bytes(whole)
        temporary.replace(kept)
    kept.replace(path)
    _keep(folder)
    names, rows = _read(path)
    writer.metrics_keys = names
    return Counter((int(row["step"]), name) for row in rows for name in names if name != "step" and row[name])


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
    paths = sorted(folder.glob("events.out.tfevents.*"))
    events = (event for path in paths for event in loader(str(path)).Load())
    return Counter((event.step, value.tag) for event in events for value in event.summary.value)


_READS = {"name", "version", "group_separator", "save_dir", "root_dir", "log_dir", "experiment"}


@contextlib.contextmanager
def silenced(loggers: Iterable[Logger]) -> Iterator[None]:
    """Let loggers write nothing in the body; their folders stay."""
    kept = [(logger, type(logger), dict(vars(logger))) for logger in loggers]
    try:
        for logger, _, space in kept:
            silence(logger)
            for name in space.keys() & vars(type(logger)).keys():
                del vars(logger)[name]  # such as `LoggedOnce`'s
        yield
    finally:
        for logger, cls, space in kept:
            logger.__class__ = cls
            vars(logger).update(space)


def silence(logger: Logger, folder: Path | None = None) -> None:
    """Let a logger write nothing; user code finds `folder` as its folder.

    It gets a subclass of its own class, so that code that asks for its kind, or its `experiment`, finds them.
    """
    cls = type(logger)
    if hasattr(cls, "is_silent"):
        return
    kept = {*vars(object), *_READS}
    found = inspect.getmembers_static(cls)
    writes = [name for name, each in found if name[0] != "_" and name not in kept and inspect.isfunction(each)]
    members: dict[str, Any] = dict.fromkeys(writes, lambda *_, **__: None)
    if folder is not None:
        members |= {name: property(lambda _: folder) for name in ("save_dir", "root_dir") if hasattr(cls, name)}
    experiment = DummyLogger().experiment
    members |= {"experiment": property(lambda _: experiment), "is_silent": True, "__module__": cls.__module__}
    logger.__class__ = type(cls.__name__, (cls,), {**members, "__qualname__": cls.__qualname__})
