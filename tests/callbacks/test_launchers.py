"""Notebooks, `ddp_spawn` and SLURM's requeue: whoever starts the processes, a second fit goes on where the first was stopped."""

from __future__ import annotations

import json
import os
import signal
import stat
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from door import checkpoint_of, digest
from launcher import run_world
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.connectors import accelerator_connector

from lightning_moe_ckpt import MoEStrategy
from lightning_moe_ckpt.callbacks import SparseCheckpoint
from lightning_moe_ckpt.errors import ConfigurationError


class Told(Callback):
    """Writes what a rank's process knows when the fit has ended; only there it is known."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: Trainer, *args: Any) -> None:
        checkpoint = checkpoint_of(trainer)
        assert checkpoint is not None
        told = {"from": checkpoint.report.resumed_from, "step": trainer.global_step}
        (self.folder / f"step{trainer.global_step}.rank{trainer.global_rank}.json").write_text(json.dumps(told))


def fit(
    folder: Path, steps: int, *others: Callback, module: BoringModel | None = None, **options: Any
) -> SparseCheckpoint:
    for name in list(os.environ):  # this process is one that no launcher has started
        if name.startswith(("TORCHELASTIC", "MASTER_")) or name.endswith(("RANK", "WORLD_SIZE")):
            del os.environ[name]
    warnings.simplefilter("ignore")
    checkpoint = SparseCheckpoint(folder / "run", window=2, overhead_target=None)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    callbacks = [Told(folder), *others, checkpoint]
    options = {"devices": 2, "limit_val_batches": 0, "default_root_dir": folder, **quiet, **options}
    Trainer(accelerator="cpu", max_steps=steps, callbacks=callbacks, **options).fit(module or BoringModel())
    return checkpoint


def told(folder: Path, step: int) -> list[int | None]:
    """Where the ranks that ended at a step had come from."""
    paths = sorted(folder.glob(f"step{step}.rank*.json"))
    return [json.loads(path.read_text())["from"] for path in paths]


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp_notebook",
        "moe_fork",
        pytest.param("ddp_spawn", marks=[pytest.mark.soak, pytest.mark.timeout(300)]),
        pytest.param("moe_spawn", marks=[pytest.mark.soak, pytest.mark.timeout(300)]),
    ],
)
def test_processes_of_a_notebook_resume(strategy: str, tmp_path: Path) -> None:
    """Two fits of one process, each in processes that Lightning forks or spawns; the callback there has the figures, and that here says so."""

    def work(_: int) -> str:
        fit(tmp_path, 4, strategy=strategy)
        checkpoint = fit(tmp_path, 7, strategy=strategy)
        try:
            return str(checkpoint.report)
        except ConfigurationError as error:
            return str(error)

    (said,) = run_world(1, work, process_group=False, timeout=timedelta(seconds=200))
    assert "where Lightning starts processes of its own" in said
    assert told(tmp_path, 4) == [None, None]
    assert told(tmp_path, 7) == [4, 4]


class Interrupts(Callback):
    """As somebody at the keyboard. Python drops an interrupt that comes while it collects garbage, so there is one at each step."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step >= 5:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_cell_that_is_run_again_ends_the_same(tmp_path: Path) -> None:
    """With `MoEStrategy` in one interactive process, as in a notebook: same bits as never interrupted."""

    def cell(name: str, *others: Callback) -> tuple[int | None, str]:
        seed_everything(1, verbose=False)
        module, strategy = BoringModel(), MoEStrategy()
        checkpoint = fit(tmp_path / name, 9, *others, module=module, devices=1, strategy=strategy)
        return checkpoint.report.resumed_from, digest([*module.parameters(), torch.rand(1)])

    def work(_: int) -> list[tuple[int | None, str]]:
        vars(accelerator_connector)["_IS_INTERACTIVE"] = True  # Lightning decides that as it is imported
        signal.signal(signal.SIGINT, signal.default_int_handler)
        calm = cell("calm")
        with pytest.raises(SystemExit):  # how Lightning ends an interrupted fit, and a notebook catches it
            cell("interrupted", Interrupts())
        return [calm, cell("interrupted")]

    (((begin, end), (resumed, end_again)),) = run_world(1, work, process_group=False)
    assert begin is None
    assert resumed in range(2, 9)
    assert end == end_again


class Requeued(Callback):
    """SLURM's warning that time is nearly over, in the middle of a fit."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 4:
            os.kill(os.getpid(), signal.SIGUSR1)


def test_slurm_requeues_and_the_next_start_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's handler of SIGUSR1 saves a file of its own and asks SLURM to queue the job again; the run goes on with ours."""
    asked = tmp_path / "scontrol.asked"
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" > {asked}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    slurm = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    slurm |= {"SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NAME": "train"}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    plain: dict[str, Any] = {"devices": 1, "plugins": [SLURMEnvironment(auto_requeue=True)]}

    def work(_: int) -> None:
        fit(tmp_path, 5, Requeued(), **plain)
        fit(tmp_path, 9, **plain)

    run_world(1, work, process_group=False, timeout=timedelta(seconds=100))
    assert asked.read_text().split() == ["requeue", "77"]
    assert list(tmp_path.glob("hpc_ckpt_*.ckpt")), "Lightning's own file, which the run does not need"
    assert told(tmp_path, 9) == [5]
