"""Log files beside our callbacks: the rows of the undisturbed run, each once, whatever was killed."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from typing_extensions import override

from campaign._campaign import Campaigns
from campaign._training import Checkpointing
from campaign._variants import Variant
from lightning_moe_ckpt.testing import Attempt, Kill, Seam

SPARSE = Checkpointing(policy="sparse", window=3)
DENSE = Checkpointing(policy="dense", every_n_steps=2)
LOGGERS = {"csv": CSVLogger, "tensorboard": TensorBoardLogger}


@dataclass(frozen=True, kw_only=True)
class Logging(Variant):
    """A run with a logger."""

    kind: Literal["csv", "tensorboard"] = "csv"
    version: str | None = None
    """Of the log folder; `None` lets Lightning number it."""
    prefix: str = ""

    @override
    def trainer_options(self, life: Attempt) -> dict[str, Any]:
        logger = LOGGERS[self.kind](str(self._folder(life)), version=self.version, prefix=self.prefix)
        return {**super().trainer_options(life), "logger": logger, "log_every_n_steps": 1}

    def _folder(self, life: Attempt) -> Path:
        """Where the logs go; fault-free runs share a work folder."""
        return life.workdir / ("logs" if self.checkpointing is not None else f"logs{life.index}")

    @override
    def returned(self, life: Attempt, trainer: Trainer) -> dict[str, Any]:
        if life.rank > 0:
            return {}
        root = self._folder(life)
        trainer.loggers[0].finalize("success")
        read = _csv_rows if self.kind == "csv" else _event_rows
        return {"folders": sorted(path.name for path in root.glob("*/*")), "rows": sorted(read(root))}


def _csv_rows(root: Path) -> list[str]:
    rows = []
    for path in root.glob("*/*/metrics.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            rows += [str({key: value for key, value in row.items() if value}) for row in csv.DictReader(file)]
    return rows


def _event_rows(root: Path) -> list[str]:
    return [
        f"{event.step} {value}"
        for path in root.glob("*/*/events.*")
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]


RUNS = {
    "csv": Logging(logged=True),
    "csv_fixed": Logging(logged=True, version="mine", prefix="train"),
    "tensorboard": Logging(logged=True, kind="tensorboard"),
    "tensorboard_fixed": Logging(logged=True, kind="tensorboard", version="mine", prefix="train"),
    "csv_accumulating": Logging(logged=True, accumulate=2, validate_every=1, epochs=4),
}
KILLS = [
    [Kill(phase="after_batch_end", step=6, settle=10.0), Kill(phase="batch_start", batches=2)],
    [Kill(phase="validation", step=4, settle=10.0)],
]


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("tensorboard", KILLS[:1]),
        ("csv_fixed", KILLS[1:]),
        *(pytest.param(name, KILLS, marks=pytest.mark.soak) for name in RUNS),
    ],
)
def test_each_row_is_logged_once(campaigns: Campaigns, name: str, kills: list[list[Kill]]) -> None:
    """In one folder, whether Lightning would have made a new one or emptied the old one."""
    campaigns.check_all(replace(RUNS[name], checkpointing=DENSE if "fixed" in name else SPARSE), kills)


def test_three_ranks_log_once(campaigns: Campaigns) -> None:
    """Only the first one writes, all of them know where."""
    campaigns.check(replace(RUNS["csv"], world_size=3, checkpointing=SPARSE), KILLS[0][0])


def _as_new(*args: Any) -> None:
    """Restores nothing."""


@pytest.mark.soak
def test_without_the_mechanism_rows_appear_twice(campaigns: Campaigns) -> None:
    """In a second folder."""
    seam = Seam(module="lightning_moe_ckpt.fit.loggers._once", attribute="LogFolders.restore", replacement=_as_new)
    with pytest.raises(AssertionError, match="version_1"):
        campaigns.check_all(replace(RUNS["csv"], checkpointing=DENSE), KILLS[:1], seams=[seam])
