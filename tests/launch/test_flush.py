"""A job that ends in failure leaves nothing in memory that storage has not: its supervisor brings it there. All kills are real."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from door import DIRECTORY_VARIABLE, free_port

from launch._jobs import Ended, Job
from launch.test_densify import SCRIPT, STEPS, same
from lightning_moe_ckpt.cli import main

STORED = re.compile(r"step (\d+) \(incarnation 1\) of run [0-9a-f]{32} is stored: ")


def job(folder: Path, ranks: int, layout: str, *asked: str, **options: object) -> Job:
    """A job whose files `asked` say what it is to do, with memory of its own."""
    folder.mkdir(exist_ok=True)
    for each in ("full", "die", "whole"):
        (folder / each).unlink(missing_ok=True)
    for each in asked:
        (folder / each).touch()
    world = options.pop("world", str(ranks))
    return Job(folder, ranks, STEPS, str(world), layout, program=SCRIPT, max_failures="0", **options)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shared memory of the only node."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(memory))
    return memory


def flushed(ended: Ended) -> int:
    """The step that was brought to storage, once."""
    (step,) = {int(found[1]) for found in map(STORED.match, ended.sentences()) if found}
    return step


def flushing(running: Job) -> list[int]:
    """The process in which a supervisor flushes."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            child = int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == running.pid
            if child and b"import flush" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(3, ""), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((1, ""), (2, "stages")))],
    ids=["3", "1", "stages"],
)
def test_a_job_that_is_given_up_is_continued_elsewhere(tmp_path: Path, memory: Path, ranks: int, layout: str) -> None:
    """Storage is full from step 5 on, all ranks are killed at step 11; a node without memory goes on with the same bits."""
    assert job(tmp_path / "whole", ranks, layout).end().code == 0
    ended = job(tmp_path / "job", ranks, layout, "full", "die").end()
    assert ended.code == 1
    assert flushed(ended) >= 8, ended.output
    shutil.rmtree(memory)
    memory.mkdir()
    ended = job(tmp_path / "job", ranks, layout, name="again").end()
    assert ended.code == 0
    assert f"resumes from step {flushed(Ended(0, (tmp_path / 'job' / 'console').read_text()))}" in ended.output
    assert same(tmp_path / "whole" / "end.ckpt", tmp_path / "job" / "end.ckpt")


@pytest.mark.soak
def test_where_sigterm_leaves_no_time_memory_is_flushed(tmp_path: Path, memory: Path) -> None:
    """The rank waits for storage, and is killed by SIGKILL soon."""
    running = job(tmp_path / "job", 1, "", "full", torchrun=["--shutdown-timeout", "1"])
    running.wait_until(lambda: running.output.count("Trying again in") > 3)
    os.kill(running.pid, signal.SIGTERM)
    ended = running.end()
    assert ended.code == 128 + signal.SIGTERM
    assert flushed(ended) >= 8, ended.output
    assert [*memory.iterdir()], "memory stays as it was"


def test_a_flush_that_takes_too_long_or_is_ended_says_so(tmp_path: Path, memory: Path) -> None:
    """By its limit, and by a second signal; afterwards the command does it, and has nothing more to do."""
    for name, limit, why in (("late", 0.2, "0.2 s were not enough"), ("ended", 60.0, "another signal came")):
        running = job(tmp_path / name, 1, "", "full", "die", flush_timeout=limit)
        if name == "ended":
            running.wait_until(lambda: bool(flushing(running)))  # noqa: B023
            (pid,) = flushing(running)
            os.kill(pid, signal.SIGSTOP)  # as if the store did not answer
            time.sleep(1.1)
            os.kill(running.pid, signal.SIGTERM)
            time.sleep(0.1)
            os.kill(pid, signal.SIGCONT)
        ended = running.end()
        assert ended.code == 1
        url = (tmp_path / name / "run").as_uri()
        stays = f"{why}; memory stays as it was: `moe-ckpt flush {url}` on this node goes on with it"
        assert stays in ended.sentences(), ended.output
    assert [main(["flush", url]) for _ in range(2)] == [0, 0]


@pytest.mark.soak
@pytest.mark.parametrize("replicas", ["0", "1"])
def test_each_node_of_a_job_flushes_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Path, replicas: str
) -> None:
    """Two supervisors on two nodes, each with a rank: together they store what a job on one other node goes on from."""
    assert job(tmp_path / "whole", 2, "").end().code == 0
    (tmp_path / "job").mkdir()
    (tmp_path / "job1").symlink_to(tmp_path / "job")
    meeting = [
        "--nnodes",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"localhost:{free_port()}",
        "--rdzv-id",
        "a",
    ]
    with monkeypatch.context() as nodes:
        for name, value in {"DEVICES": "1", "NUM_NODES": "2", "ACCELERATOR": "cpu"}.items():
            nodes.setenv(f"PL_TRAINER_{name}", value)
        nodes.setenv("TEST_REPLICAS", replicas)
        jobs = []
        for node, folder in enumerate(("job", "job1")):
            (tmp_path / f"memory{node}").mkdir()
            nodes.setenv(DIRECTORY_VARIABLE, str(tmp_path / f"memory{node}"))
            nodes.setenv("MOE_CKPT_NODE", str(node))
            running = job(tmp_path / folder, 1, "", "full", "die", world="auto", torchrun=meeting, name=f"node{node}")
            jobs.append(running)
        ended = [each.end() for each in jobs]
    assert [each.code for each in ended] == [1, 1]
    steps = {int(found[1]) for each in ended for found in map(STORED.match, each.sentences()) if found}
    assert steps, "\n".join(each.output for each in ended)
    assert max(steps) >= 8
    ended = [job(tmp_path / "job", 2, "", name="again").end()]
    assert ended[0].code == 0
    assert f"resumes from step {max(steps)}" in ended[0].output
    assert same(tmp_path / "whole" / "end.ckpt", tmp_path / "job" / "end.ckpt")
