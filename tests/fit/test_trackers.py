"""Runs of Weights & Biases and MLflow go on under one id, with each row once, when a training is killed and resumed.

The services are stood in for by a run that keeps what it is given, since both packages take longer to install and import than all
of this; `test_the_real_packages` runs with them where they are installed.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
from torch import Tensor, nn
from typing_extensions import override

from lightning_moe_ckpt.callbacks import DenseCheckpoint


class Net(tiny.ToZero):
    """One layer, which logs in every step."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 2), optimizer=partial(torch.optim.SGD, lr=0.1))
        self.save_hyperparameters({"width": 4})

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class KilledError(RuntimeError):
    """Ends a fit as a crash would: nothing more is stored."""


class Die(Callback):
    """In the middle of a step, four behind the newest generation."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.at:
            raise KilledError


def fit(url: Path, logger: Logger, *, die_at: int = -1) -> None:
    checkpoint = DenseCheckpoint(url, every_n_steps=4, overhead_target=None)
    data = tiny.rows(tiny.waves(100, 4), 2)
    with nullcontext() if die_at < 0 else pytest.raises(KilledError):
        tiny.fit(Net(), data, Die(die_at), checkpoint, max_steps=12, logger=logger, log_every_n_steps=1)


class Service:
    """What a service of experiments has: rows by run, with those of runs that were deleted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[str, list[tuple[int, str]]] = {}
        self.deleted: list[str] = []


class FakeWandbRun:
    """The part of `wandb.Run` that Lightning's logger and ours use."""

    def __init__(self, service: Service, run_id: str) -> None:
        self._service, self.id, self.name, self.offline = service, run_id, run_id, True
        self.dir = str(service.folder / f"offline-run-{len(service.rows)}-{run_id}" / "files")
        Path(self.dir).mkdir(parents=True)
        self.config, self.finished = SimpleNamespace(update=lambda *_, **__: None), False
        service.rows.setdefault(run_id, [])

    def log(self, row: dict[str, Any]) -> None:
        step = row.pop("trainer/global_step")
        self._service.rows[self.id] += [(step, name) for name in row]

    def finish(self) -> None:
        self.finished = True


class FakeWandbLogger(WandbLogger):
    """Makes runs of the stand-in as the logger makes real ones: when it is asked first, under its id or a new one."""

    def __init__(self, service: Service) -> None:
        Logger.__init__(self)
        self._service, self._experiment = service, None
        self._prefix, self._id, self._wandb_init = "", None, {}
        self._save_dir, self._project, self._name, self._log_model = str(service.folder), "p", None, False
        self._checkpoint_name, self._logged_model_time, self._checkpoint_callbacks = None, {}, {}

    @property
    def experiment(self) -> Any:
        if self._experiment is None:
            self._experiment = FakeWandbRun(
                self._service, self._wandb_init.get("id") or f"run{len(self._service.rows)}"
            )
        return self._experiment


class FakeClient:
    """The part of `MlflowClient` that Lightning's logger and ours use."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def create_run(self) -> str:
        run_id = f"run{len(self._service.rows)}"
        self._service.rows[run_id] = []
        return run_id

    def get_run(self, run_id: str) -> Any:
        names = {name for _, name in self._service.rows[run_id]}
        return SimpleNamespace(data=SimpleNamespace(metrics=names))

    def get_metric_history(self, run_id: str, key: str) -> list[Any]:
        return [SimpleNamespace(step=step) for step, name in self._service.rows[run_id] if name == key]

    def update_run(self, run_id: str, status: str) -> None:
        assert run_id in self._service.rows

    def delete_run(self, run_id: str) -> None:
        assert not self._service.rows.pop(run_id)
        self._service.deleted.append(run_id)


class FakeMLFlowLogger(MLFlowLogger):
    """As the logger, with the stand-in for the client."""

    def __init__(self, service: Service) -> None:
        Logger.__init__(self)
        self._service, self._mlflow_client = service, FakeClient(service)
        self._run_id, self._initialized, self._prefix = None, False, ""
        self._checkpoint_callback, self._experiment_id = None, None

    @property
    def experiment(self) -> Any:
        if self._run_id is None:
            self._run_id = self._mlflow_client.create_run()
        self._initialized = True
        return self._mlflow_client

    @property
    def save_dir(self) -> str:
        return str(self._service.folder)

    @property
    def name(self) -> str:
        return "p"

    def log_hyperparams(self, *_: Any) -> None:
        assert self.experiment

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        assert self.experiment
        assert step is not None
        self._service.rows[str(self._run_id)] += [(step, name) for name in metrics]

    def finalize(self, status: str = "success") -> None:
        pass


@pytest.mark.parametrize("make", [FakeWandbLogger, FakeMLFlowLogger], ids=["wandb", "mlflow"])
def test_a_tracked_run_goes_on_under_one_id(make: Callable[[Service], Logger], tmp_path: Path) -> None:
    """Each process begins a run to log hyperparameters, before it knows that it resumes; no row comes twice, none is missing."""
    service = Service(tmp_path / "logs")
    for die_at in (7, 10, -1):
        fit(tmp_path / "run", make(service), die_at=die_at)
    (rows,) = (rows for rows in service.rows.values() if rows)
    losses = Counter(step for step, name in rows if name == "loss")
    assert losses == Counter(range(12))
    if make is FakeWandbLogger:
        folders = [path.name for path in service.folder.glob("offline-run-*")]
        assert {name.rsplit("-", 1)[1] for name in folders} == {"run0"}, "runs that were begun in vain are removed"
    else:
        assert len(service.deleted) == 2
        assert list(service.rows) == ["run0"]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_the_real_packages(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases offline, MLflow with files; `pip install wandb mlflow-skinny`."""
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer releases would rather have a database
    monkeypatch.setenv("MOE_CKPT_SHARED_MEMORY", str(tmp_path))
    makers: dict[str, Callable[[], Logger]] = {
        "wandb": lambda: WandbLogger(project="p", save_dir=tmp_path / "logs", offline=True),
        "mlflow": lambda: MLFlowLogger("p", tracking_uri=f"file:{tmp_path / 'logs'}"),
    }
    (tmp_path / "logs").mkdir()
    ids = set()
    for die_at in (7, 10, -1):
        logger = makers[kind]()
        fit(tmp_path / "run", logger, die_at=die_at)
        ids.add(logger.version)
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()
    assert len(ids) == 1
    if kind == "mlflow":
        assert isinstance(logger, MLFlowLogger)
        history = logger.experiment.get_metric_history(str(logger.run_id), "loss")
        assert sorted(each.step for each in history) == list(range(12))
        return
    (rows,) = (tmp_path / "logs").glob("moe-ckpt-rows-*.jsonl")
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    assert sorted(step for step, *names in lines if "loss" in names) == list(range(12))
    folders = {path.name.rsplit("-", 1)[1] for path in (tmp_path / "logs" / "wandb").glob("offline-run-*")}
    assert folders == ids
