"""Log each row once, although a resumed run repeats steps that an earlier process has logged.

*Services.* The journal names the run of Weights & Biases or MLflow, like the folder of other loggers, and a resumed
training goes on under that id. If Lightning has begun another run by then, to log hyperparameters, that run is left:
MLflow's is deleted, an offline run of Weights & Biases is removed, an online run is finished and stays empty.

MLflow can be asked for rows that a killed process logged beyond the resumed boundary. Weights & Biases cannot, at least
offline. So steps and names of rows are written to a small file beside its own, `moe-ckpt-rows-<id>.jsonl`, row by row.
A resumed training that does not find the file, as on another machine without a shared disk, logs these rows twice.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger

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
        """Return the rows' place, and counts of keys logged under the newest step."""
        raise NotImplementedError

    def restore(self, taken: Mapping[str, Any]) -> None:
        """Go on in the place of the run's rows."""
        raise NotImplementedError

    def start(self) -> dict[str, Any]:
        """Return the rows' place, as before the first row."""
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
        fresh = {key: value for key, value in metrics.items() if self._is_fresh(step, key)}
        if fresh:
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


log = rank_logger(__name__)


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


def remote_log(logger: Logger, *, owner: bool) -> RemoteLog | None:
    """Return the log of a logger with a service; `None` for any other logger."""
    if isinstance(logger, WandbLogger):
        return WandbLog(logger, owner=owner)
    return MLFlowLog(logger, owner=owner) if isinstance(logger, MLFlowLogger) else None
