"""Versions of what decides bits: every generation says them, and a resume with others is a warning, nothing worse."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn

from lightning_moe_ckpt import coordination
from lightning_moe_ckpt.callbacks import DenseCheckpoint
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.storage import RunView, open_backend


def fit(url: Path, steps: int) -> None:
    module = tiny.ToZero(nn.Linear(2, 1), optimizer=partial(torch.optim.SGD, lr=0.1))
    tiny.fit(module, tiny.rows(torch.ones(8, 2), 2), DenseCheckpoint(url), max_steps=steps)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING and "exact" in record.msg
    ]


@pytest.mark.filterwarnings("ignore")  # Lightning's advice about this tiny run
def test_a_resume_with_another_version_is_a_warning_and_goes_on(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same versions: not a word. Another torch: both are named, the run goes on, and what it writes says the new one."""
    caplog.set_level(logging.WARNING)
    own = coordination.own_versions()
    assert own["torch"] == str(torch.__version__)
    fit(tmp_path / "run", 2)
    fit(tmp_path / "run", 3)
    assert warned(caplog) == []
    monkeypatch.setattr(coordination, "own_versions", lambda: own | {"torch": "99.1"})
    fit(tmp_path / "run", 4)
    (warning,) = warned(caplog)
    assert f"torch {own['torch']}" in warning
    assert "torch 99.1" in warning
    view = RunView.open(open_backend(str(tmp_path / "run")))
    newest = view.generations()[0]
    assert newest.generation.step == 4
    assert newest.commit is not None
    assert newest.commit.policy[coordination.VERSIONS] == own | {"torch": "99.1"}
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert "torch 99.1" in capsys.readouterr().out


class Said:
    """An exchange in which other ranks say something else."""

    is_coordinator = True

    def __init__(self, *others: object) -> None:
        self.others = others

    def gather_values(self, value: object) -> list[object]:
        return [value, *self.others]


def test_ranks_with_other_versions_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Markers say rank 0's, so that they agree."""
    own = coordination.own_versions()
    exchange: Any = Said(own, own | {"lightning": "0.1"})
    assert coordination.agreed_versions(exchange) == own
    (warning,) = warned(caplog)
    assert "ranks [2]" in warning
    assert "lightning 0.1" in warning
