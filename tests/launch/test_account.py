"""The account of a run's wall time, against a clock outside: ranks are killed under both launchers, all kills are real."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import main as torchrun

from launch._jobs import LIMIT_SECONDS, Job
from lightning_moe_ckpt.goodput import PARTS
from lightning_moe_ckpt.inspection._run_progress import Follower
from lightning_moe_ckpt.storage import RunView, open_backend

SCRIPT = Path(__file__).with_name("to_account.py")
STEPS = 40


def accounted(folder: Path, began: float) -> dict[str, Any]:
    """What rank 0 has said at its end, whose parts are the time since the beginning, within a hundredth."""
    said = json.loads((folder / "account").read_text())
    wall = said["ended"] - began
    print({name: round(seconds, 2) for name, seconds in said.items()}, round(began, 2), round(wall, 2))
    # Half a second for what no process can know: how long a busy machine took to make the first one.
    assert sum(said[part] for part in PARTS) == pytest.approx(wall, rel=0.01, abs=0.5)
    return dict(said)


def check(said: dict[str, Any], folder: Path, plain: float) -> None:
    """Each part is where it belongs; productive time is that of a run without checkpoints, as far as machines allow."""
    for part in ("hooks", "detection", "startup", "restore"):
        assert said[part] > 0, part
    assert said["repeated"] + said["lost"] > 0
    assert said["idle"] == 0
    # A pause makes out most of a step; the rest is longer at times where others use the machine.
    assert plain / 1.4 < said["productive"] < 1.4 * plain
    backend = open_backend(str(folder / "run"))
    found = Follower(RunView.open(backend)).look().goodput
    backend.close()
    assert found is not None
    assert 0 <= sum(said[part] for part in PARTS) - found.wall < 2, "the log's newest entry is from the end"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], float]:
    """Seconds of a training without checkpoints and failures, by its number of ranks."""

    def trained(ranks: int) -> float:
        folder = tmp_path_factory.mktemp("plain")
        ended = Job(folder, ranks, STEPS, "plain", program=SCRIPT).end()
        assert ended.code == 0, ended.output
        return float(json.loads((folder / "account").read_text())["trained"])

    return cache(trained)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "kills"),
    [(1, ("0:17", "0:28")), pytest.param(3, ("2:17", "0:28"), marks=pytest.mark.soak)],
)
def test_parts_are_the_wall_time_under_moe_ckpt_run(
    tmp_path: Path, plain: Callable[[int], float], ranks: int, kills: tuple[str, ...]
) -> None:
    """A spare takes the place of the first that dies, and a new process that of the second."""
    job = Job(tmp_path, ranks, STEPS, *kills, spares=1, program=SCRIPT)
    began = time.monotonic()  # a fork of all that tests have imported may take long
    ended = job.end()
    assert ended.code == 0, ended.output
    assert all((tmp_path / kill).exists() for kill in kills)
    check(accounted(tmp_path, began), tmp_path, plain(ranks))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "kills"),
    [
        pytest.param(1, ("0:17", "0:28"), marks=pytest.mark.soak),
        pytest.param(3, ("2:17", "0:28"), marks=pytest.mark.soak),
    ],
)
def test_parts_are_the_wall_time_under_torchrun(
    tmp_path: Path, plain: Callable[[int], float], ranks: int, kills: tuple[str, ...]
) -> None:
    """All processes are started anew, and imports take most of the time."""
    began = time.monotonic()
    job = subprocess.run(
        [
            *(sys.executable, "-m", torchrun.__module__, "--standalone", "--nproc-per-node", str(ranks)),
            *("--max-restarts", "3", str(SCRIPT), str(tmp_path), str(STEPS), *kills),
        ],
        timeout=2 * LIMIT_SECONDS,
        check=False,
        capture_output=True,
        text=True,
    )
    assert job.returncode == 0, job.stderr
    assert all((tmp_path / kill).exists() for kill in kills)
    said = accounted(tmp_path, began)
    check(said, tmp_path, plain(ranks))
    assert said["startup"] > said["detection"]


def test_a_job_that_somebody_starts_again_was_idle(tmp_path: Path) -> None:
    """Nobody lived who could have noticed."""
    began = time.monotonic()
    assert Job(tmp_path, 1, STEPS, "0:30", program=SCRIPT, max_failures="0 per 1h", flush_timeout=0).end().code != 0
    time.sleep(2.0)
    ended = Job(tmp_path, 1, STEPS, "0:30", program=SCRIPT).end()
    assert ended.code == 0, ended.output
    said = accounted(tmp_path, began)
    assert said["idle"] >= 2
    assert said["detection"] == 0
