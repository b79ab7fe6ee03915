"""A rank of a pipeline stage is killed under `moe-ckpt run`: a spare takes its place, and its stage recovers alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("two_stages.py")
STEPS = 60
LIMIT_SECONDS = 240.0


def started(folder: Path) -> subprocess.Popen[str]:
    folder.mkdir()
    command = [sys.executable, "-m", "lightning_moe_ckpt", "run", "--nproc-per-node", "2", "--spares", "1"]
    return subprocess.Popen(
        [*command, str(SCRIPT), str(folder), str(STEPS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def lines(folder: Path, rank: int) -> list[tuple[int, int]]:
    """Steps of a rank, and the process that has taken each."""
    path = folder / f"steps{rank}"
    found = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(step), int(pid)) for step, pid in found]


@pytest.mark.timeout(300)
def test_a_spare_takes_the_steps_of_its_stage_again_while_the_other_waits(tmp_path: Path) -> None:
    """Beside a job that nobody kills, which ends with the same weights."""
    whole, killed = (started(tmp_path / name) for name in ("whole", "killed"))
    give_up = time.monotonic() + LIMIT_SECONDS
    while not (seen := lines(tmp_path / "killed", 1)) or seen[-1][0] < STEPS // 3:
        assert time.monotonic() < give_up
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.01)
    os.kill(seen[-1][1], signal.SIGKILL)
    said = [each.communicate(timeout=max(1.0, give_up - time.monotonic()))[0] for each in (whole, killed)]
    assert (whole.returncode, killed.returncode) == (0, 0), said[1]
    for rank in range(2):
        one, other = (torch.load(tmp_path / name / f"end{rank}", weights_only=True) for name in ("whole", "killed"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), f"rank {rank}\n{said[1]}"
    stayed, came = lines(tmp_path / "killed", 0), lines(tmp_path / "killed", 1)
    assert [step for step, _ in stayed] == [*range(1, STEPS + 1)], "no step was taken again"
    assert (len({pid for _, pid in stayed}), len({pid for _, pid in came})) == (1, 2)
    assert "was killed by SIGKILL; a spare takes its place" in said[1]
    assert re.search(r"stage 1 goes from step \d+ to step \d+ alone", said[1])
    assert re.search(r"stage 0 goes on in step \d+, [\d.]+ s after the failure", said[1])
