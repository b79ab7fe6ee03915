"""`moe-ckpt diff`: equal runs are equal, a fault of one step is named, and the step at which runs part."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from door import CheckpointCallback
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from typing_extensions import override

from inspection._runs import Small, train
from lightning_moe_ckpt.callbacks import DenseCheckpoint, DifferentialCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.cli import main

FAULTY = 4
"""Step in which a gradient has a flipped bit."""
POLICIES: dict[str, Callable[[str], CheckpointCallback]] = {
    "dense": partial(DenseCheckpoint, every_n_steps=2, keep=9),
    "sparse": partial(SparseCheckpoint, window=2, keep=9),
    "differential": partial(DifferentialCheckpoint, every_n_steps=5, batch=2, keep=20),
}


class FlippedBit(Callback):
    """Flips a bit in one element of a gradient, in one step."""

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if trainer.global_step == FAULTY:
            grad = pl_module.get_parameter("net.0.weight").grad
            assert grad is not None
            grad.view(torch.int32).view(-1)[5] ^= 1 << 22


@pytest.fixture(scope="module", params=POLICIES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """URLs of three runs: two alike, and one with a fault."""
    root, make = tmp_path_factory.mktemp(request.param), POLICIES[request.param]
    for name in ("a", "alike", "faulty"):
        seed_everything(1, verbose=False)
        train(Small(), make(str(root / name)), *[FlippedBit()] * (name == "faulty"), steps=9)
    return str(root / "a"), str(root / "alike"), str(root / "faulty")


def told(capsys: pytest.CaptureFixture[str], *argv: str, status: int) -> dict[str, Any]:
    """The document that `diff` writes."""
    assert main(["diff", *argv, "--json"]) == status
    return dict(json.loads(capsys.readouterr().out))


def test_runs_alike_are_equal(capsys: pytest.CaptureFixture[str], runs: tuple[str, str, str]) -> None:
    """Nothing is read for it but journals, and nothing else differs."""
    found = told(capsys, runs[0], runs[1], status=0)
    assert found["equal"]
    assert (found["compared"], found["different"], found["beside"], found["parting"]) == (3, [], [], None)


def test_the_step_at_which_runs_part_is_found(capsys: pytest.CaptureFixture[str], runs: tuple[str, str, str]) -> None:
    """A bit of one gradient, in one step: the last generation before it is equal, the next is not."""
    found = told(capsys, runs[0], runs[2], status=1)
    parting = found["parting"]
    assert parting["equal"] is None or parting["equal"] <= FAULTY
    assert parting["differs"] > FAULTY
    assert parting["looked"] <= 4
    if parting["equal"] is not None:
        told(capsys, f"{runs[0]}@{parting['equal']}", f"{runs[2]}@{parting['equal']}", status=0)
    found = told(capsys, f"{runs[0]}@{parting['differs']}", runs[2], status=1)
    assert "net.0" in found["different"]
    left = parting["first"].endswith(f"as step {FAULTY} has left it")
    assert left or parting["first"].startswith(f"the loss of step {FAULTY + 1}, rank 0: ")
    assert left or found["a"]["kind"] == "dense"  # which has no records of the steps between
