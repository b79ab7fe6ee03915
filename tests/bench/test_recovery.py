"""What recovery is compared with does restore, and every case has its turns."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from launcher import run_world
from lightning.pytorch import Callback, Trainer
from rich.console import Console

from benchmarks.__main__ import PROGRAM
from benchmarks.peers_saving import DcpCheckpoint
from benchmarks.recovery import (
    CASES,
    EXCHANGES,
    PHASES,
    HostRestoreFigure,
    RecoveryFigure,
    _host_line,
    newest_step,
    table,
)
from lightning_moe_ckpt.benchmarks._fits import BenchModel, ModelSize, quiet_lightning, random_tokens
from lightning_moe_ckpt.cli import run

SIZE = ModelSize(num_blocks=1, model_dim=32, num_experts=2, expert_dim=32, batch_size=2)

MOST_EXCHANGES = 32
"""A sparse restart of two ranks without faults, to its first step: each exchange costs turns of the scheduler on busy cores."""


def _state(trainer: Trainer, model: BenchModel) -> dict[str, torch.Tensor]:
    """Parameters and both moments by name."""
    (optimizer,) = trainer.optimizers
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        state[name] = parameter
        state.update({f"{name}/{key}": optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")})
    return {key: value.detach().clone() for key, value in state.items()}


class _AtStart(Callback):
    def __init__(self) -> None:
        self.state: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: BenchModel) -> None:  # type: ignore[override]
        if trainer.optimizers[0].state:
            self.state = _state(trainer, pl_module)


def _fit(
    folder: Path, steps: int, first: int, seed: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float, int]:
    """State at start and at end of a fit, the last learning rate, and the bytes that were saved."""
    torch.manual_seed(seed)
    model, start = BenchModel(SIZE), _AtStart()
    checkpoint = DcpCheckpoint(folder, every_n_steps=2, first_step=first)
    trainer = Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[checkpoint, start],
    )  # fmt: skip
    with quiet_lightning():
        trainer.fit(model, random_tokens(SIZE, steps + 1))
    return start.state, _state(trainer, model), trainer.optimizers[0].param_groups[0]["lr"], checkpoint.nbytes


def test_distributed_checkpoint_restores_what_it_saved(tmp_path: Path) -> None:
    """Parameters, moments and learning rate of the newest whole checkpoint, over another seed's; two are kept."""

    def work(_: int) -> tuple[list[int], int, list[str], float, float, int]:
        _none, saved, rate, saved_nbytes = _fit(tmp_path, steps=6, first=0, seed=0)
        (tmp_path / "8").mkdir()  # a save that a kill interrupted
        steps = sorted(int(path.name) for path in tmp_path.iterdir())
        newest = newest_step(tmp_path)
        restored, _end, next_rate, _none_saved = _fit(tmp_path, steps=1, first=newest, seed=1)
        return (
            steps,
            newest,
            [key for key in saved if not torch.equal(saved[key], restored[key])],
            rate,
            next_rate,
            saved_nbytes,
        )

    ((steps, newest, differing, rate, next_rate, saved_nbytes),) = run_world(
        1, work, process_group=False, timeout=timedelta(minutes=2)
    )
    assert (steps, newest, differing) == ([4, 6, 8], 6, [])
    assert next_rate > rate, "the warm-up goes on"
    assert saved_nbytes == pytest.approx(3 * 12 * SIZE.num_params(), rel=0.05)


def _shown(figures: list[RecoveryFigure]) -> str:
    console = Console(width=300, file=io.StringIO(), record=True)
    console.print(table(figures))
    return console.export_text()


@pytest.mark.soak
def test_sparse_checkpoints_and_lightnings_own_are_killed_and_resumed() -> None:
    """Steps and times add up; a `.ckpt` costs the steps since it was written."""

    def work(_: int) -> tuple[int, str]:
        size = ["--kills", "1", "--nodes", "2", "--every", "2", "--recovery-blocks", "1", "--recovery-dim", "32"]
        size += ["--host-kills", "2", "--host-megabytes", "1", "--breakdown"]
        with redirect_stdout(io.StringIO()) as out:
            status = run(
                PROGRAM, "benchmarks", ["recovery", "--json", "--systems", "sparse", "--systems", "lightning", *size]
            )
        return status, out.getvalue()

    ((status, out),) = run_world(1, work, process_group=False, timeout=timedelta(minutes=4))
    assert status == 0
    *rows, host = json.loads(out)["recovery"]
    assert (host["nbytes"], len(host["seconds"])) == (2**20, 2)
    assert min(host["seconds"]) > 0
    figures = [RecoveryFigure(**row) for row in rows]
    assert [(figure.system, figure.loss) for figure in figures] == [c for c in CASES if c[0] in ("sparse", "lightning")]
    for figure in figures:
        assert 0 < figure.rollback_steps <= 3 * 2 + 1
        assert 0 < figure.rerun_seconds < figure.total_seconds
        assert figure.ready_seconds < figure.total_seconds
        assert figure.hook_seconds > 0
        for phases in figure.phases:
            own = figure.system == "sparse"
            assert (0 < phases.pop(EXCHANGES) <= MOST_EXCHANGES) == own, "a restart may not ask more often than it does"
            assert 0 < sum(phases.values()) < figure.total_seconds
            assert phases.keys() <= PHASES.keys()
            assert ("agreement" in phases, phases["load"] > 0) == (figure.system == "sparse", True)
    assert "second look or load" in _shown(figures)
    assert figures[-1].rollback_steps == 1, "written at step 6, killed in the step after"
    # Of 12 bytes per parameter half in each step, and the weights of the other half in one of two; journals are besides.
    state_nbytes = 12 * figures[0].num_params
    assert all(0.5 < figure.saved_nbytes / state_nbytes < 1.2 for figure in figures), figures


@pytest.mark.parametrize(("seconds", "outcome"), [([0.05, 0.3, 0.09], "met"), ([0.05, 0.11, 0.3], "NOT met")])
def test_the_goal_for_host_memory_is_judged_by_the_median(seconds: list[float], outcome: str) -> None:
    """And shown with the range."""
    said = _host_line(HostRestoreFigure(nbytes=50 * 2**20, seconds=seconds))
    assert said.endswith(f"goal 100 ms for 50 MiB: {outcome}")
    assert "50.0 ms to 300 ms in 3 kills" in said


def test_no_checkpoint_is_no_step(tmp_path: Path) -> None:
    """A folder with half a save in it."""
    (tmp_path / "2").mkdir()
    assert newest_step(tmp_path) == 0
