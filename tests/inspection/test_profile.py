"""`moe-ckpt profile`: what a run that was killed has measured, and what it has not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inspection._runs import Small, train
from lightning_moe_ckpt.callbacks import SparseCheckpoint
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.simulation import Failures, Ours, Profile, simulate
from lightning_moe_ckpt.testing import Attempt, Kill, run_attempts

STEPS, WINDOW = 60, 2


def fit(attempt: Attempt) -> dict[str, Any]:
    checkpoint = SparseCheckpoint(attempt.url, window=WINDOW, every_n_steps=6, keep=1, overhead_target=None)
    train(Small(), checkpoint, *attempt.callbacks(), steps=STEPS)
    return {}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a run that was killed by SIGKILL at step 30, and ended."""
    folder = tmp_path_factory.mktemp("killed")
    url = (folder / "run").as_uri()
    run_attempts(fit, url=url, workdir=folder, kills=[Kill(phase="forward", step=30, settle=20.0)], timeout=60)
    return url


def test_a_killed_run_has_measured_what_a_simulation_needs(
    killed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps, hooks, bytes, the restart and its replay are the run's; the file is a profile, and can be simulated."""
    out = tmp_path / "profile.yaml"
    assert main(["profile", killed, str(out), "--set", "speeds.device_host=20GB", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    profile = Profile.read(out)
    assert 0 < profile.step_seconds < 1
    assert 0 < profile.costs.startup < 60
    assert 0 < profile.costs.restore_fixed < 60
    assert profile.costs.hooks_per_capture > profile.costs.hooks_per_step > 0
    assert profile.costs.replay_factor > 0
    sizes = Small()
    assert profile.model.params == sum(parameter.numel() for parameter in sizes.parameters())
    assert sum(full for full, _ in profile.model.operators) >= 12 * profile.model.params
    assert sum(read for _, read in profile.model.operators) == 4 * profile.model.params
    assert answer["sources"]["speeds.device_host"] == "given"
    assert set(answer["missing"]) == {"speeds.host_host", "costs.repair"}
    found = simulate(profile, Ours(window=WINDOW), Failures(mtbf=600, scope="process"), until_seconds=36000)
    assert found.failures > 30
    assert 0.1 < found.goodput.share < 1, "hooks of so small a model are as long as its steps"


def test_what_was_not_measured_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that never failed knows no restart: nothing is made up, and nothing is written until the user gives it."""
    url, out = str(tmp_path / "run"), tmp_path / "profile.yaml"
    train(Small(), SparseCheckpoint(url, window=WINDOW, every_n_steps=6, overhead_target=None), steps=STEPS)
    given = ["profile", url, str(out), "--set", "speeds.device_host=20GB"]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert "`costs.detection` is missing" in said
    for name in ("costs.startup", "costs.restore_fixed", "costs.replay_factor"):
        assert f"{name}: no start" in said
    assert not out.exists()
    given += ["--set", "costs.detection=5s", "--set", "costs.startup=1min"]
    assert main(given) == 0
    assert "costs.replay_factor: left out, no start repeated steps" in capsys.readouterr().out
    assert Profile.read(out).costs.startup == 60
    assert main(given) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*given, "--force", "--set", "costs.startup=-1"]) == 2
    assert "`costs.startup: -1` must be" in capsys.readouterr().err
    assert main([*given, "--force", "--set", "cluster.nodes=2"]) == 2
    assert "The run has 1 ranks, and not 2 nodes of 1" in capsys.readouterr().err
