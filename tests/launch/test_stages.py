"""Ranks of pipeline stages are killed under `moe-ckpt run`, at one moment: their stages recover without the others."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from door import free_port

from launch._jobs import Job

SCRIPT = Path(__file__).with_name("in_stages.py")
STEPS = 30


def started(folder: Path, stages: int, *, ranks: int | None = None, **options: Any) -> Job:
    """A job, or one node of it, with so many of the ranks."""
    return Job(folder, ranks or stages, STEPS, str(stages), spares=1, program=SCRIPT, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Folders of jobs that nobody kills, by their number of stages."""

    def finished(stages: int) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        ended = started(folder, stages).end()
        assert ended.code == 0, ended.output
        return folder

    return cache(finished)


def lines(folder: Path, rank: int) -> list[tuple[int, int]]:
    """Steps of a rank, and the process that has taken each."""
    path = folder / f"steps{rank}"
    found = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(step), int(pid)) for step, pid in found]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("stages", "killed"),
    [
        (2, (1,)),
        pytest.param(3, (1, 2), marks=pytest.mark.soak),
        pytest.param(3, (0, 1), marks=pytest.mark.soak),
        pytest.param(4, (1, 2), marks=pytest.mark.soak),
        pytest.param(4, (0, 3), marks=pytest.mark.soak),
    ],
)
def test_stages_take_their_steps_again_while_the_others_wait(
    tmp_path: Path, whole: Callable[[int], Path], stages: int, killed: tuple[int, ...]
) -> None:
    """A job that nobody kills ends with the same weights. A spare takes the place of one."""
    job = started(tmp_path, stages)
    job.wait_until(lambda: len(lines(tmp_path, killed[0])) >= STEPS // 3)
    for rank in killed:
        os.kill(lines(tmp_path, rank)[-1][1], signal.SIGKILL)
    said = check(whole(stages), tmp_path, [job], killed)
    assert "was killed by SIGKILL; a spare takes its place" in said


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "killed"),
    [
        (1, (1,)),
        pytest.param(1, (0,), marks=pytest.mark.soak),
        pytest.param(2, (3,), marks=pytest.mark.soak),
        pytest.param(2, (1, 2), marks=pytest.mark.soak),
        pytest.param(2, (0, 3), marks=pytest.mark.soak),
    ],
)
def test_stages_of_two_nodes(tmp_path: Path, whole: Callable[[int], Path], ranks: int, killed: tuple[int, ...]) -> None:
    """Each node has a supervisor of its own, and half of the stages; neighbours that fail together are one on each."""
    stages, port = 2 * ranks, free_port()
    meeting = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two", "--local-addr", "127.0.0.1"]
    jobs = []
    for node in range(2):
        # Who hosts the store where nodes meet cannot be told from the address: both are on one machine.
        torchrun = [*meeting, "--rdzv-conf", f"is_host={node == 0}"]
        jobs.append(started(tmp_path, stages, ranks=ranks, torchrun=torchrun, name=f"console{node}"))
    jobs[0].wait_until(lambda: len(lines(tmp_path, killed[0])) >= STEPS // 3)
    for rank in killed:
        os.kill(lines(tmp_path, rank)[-1][1], signal.SIGKILL)
    said = check(whole(stages), tmp_path, jobs, killed)
    assert "started anew" not in said


def check(whole: Path, folder: Path, jobs: list[Job], killed: tuple[int, ...]) -> str:
    """Require the end of the whole job from the nodes of one that has lost ranks; return what all nodes have said."""
    ended = [job.end() for job in jobs]
    said = "".join(each.output for each in ended)
    assert all(each.code == 0 for each in ended), said
    for rank in range(sum(job.ranks for job in jobs)):
        one, other = (torch.load(each / f"end{rank}", weights_only=True) for each in (whole, folder))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), f"rank {rank}\n{said}"
        taken = lines(folder, rank)
        assert len({pid for _, pid in taken}) == (2 if rank in killed else 1)
        if rank in killed:
            beside = [each for each in (rank - 1, rank + 1) if each in killed]
            with_them = f" with stages {beside}" if beside else ""
            assert re.search(rf"stage {rank} goes from step \d+ to step \d+ alone{re.escape(with_them)},", said)
        else:
            assert [step for step, _ in taken] == [*range(1, STEPS + 1)], "no step was taken again"
            assert re.search(rf"stage {rank} goes on in step \d+, [\d.]+ s after the failure", said)
    return said


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["stopped", "slow", "hangs"])
def test_a_stage_is_looked_after_while_it_repeats_steps(
    tmp_path: Path, whole: Callable[[int], Path], what: str
) -> None:
    """It may take longer than ranks may to come together, and is replaced if it comes to nothing any more."""
    options: dict[str, Any] = {"stopped": {}, "slow": {"recover_timeout": 8.0}, "hangs": {"recover_timeout": 12.0}}[
        what
    ]
    job = started(tmp_path, 2, hang_timeout=1.0, **options)
    job.wait_until(lambda: len(lines(tmp_path, 1)) >= STEPS // 3)
    pid, slow = lines(tmp_path, 1)[-1][1], tmp_path / "slow1"
    os.kill(pid, signal.SIGSTOP)
    if what != "stopped":
        slow.write_text("3" if what == "slow" else "3600")
        os.kill(pid, signal.SIGKILL)
        took = len(lines(tmp_path, 1))
        job.wait_until(lambda: len(lines(tmp_path, 1)) >= took + 4 or not slow.exists())
    if what == "slow":
        slow.unlink()
    said = check(whole(2), tmp_path, [job], (1,))
    assert "started anew" not in said
    assert ("has not passed a step for" in said) == (what == "hangs")
