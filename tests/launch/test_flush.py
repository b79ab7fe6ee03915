"""A job that ends in failure leaves nothing in memory that storage has not: its supervisor brings it there. All kills are real."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from door import DIRECTORY_VARIABLE

from launch._jobs import Ended, Job
from launch.test_densify import SCRIPT, STEPS, same

STORED = re.compile(r"step (\d+) \(incarnation 1\) of run [0-9a-f]{32} is stored: ")


def job(folder: Path, ranks: int, layout: str, *asked: str, **options: object) -> Job:
    """A job whose files `asked` say what it is to do, with memory of its own."""
    folder.mkdir(exist_ok=True)
    for each in ("full", "die", "whole"):
        (folder / each).unlink(missing_ok=True)
    for each in asked:
        (folder / each).touch()
    return Job(folder, ranks, STEPS, str(ranks), layout, program=SCRIPT, max_failures="0", **options)


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


@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, ""), (3, ""), pytest.param(2, "stages", marks=pytest.mark.soak)], ids=["1", "3", "stages"]
)
def test_a_job_that_is_given_up_is_continued_elsewhere(tmp_path: Path, memory: Path, ranks: int, layout: str) -> None:
    """Storage is full from step 5 on, all ranks are killed at step 11; a node without memory goes on with the same bits."""
    assert job(tmp_path / "whole", ranks, layout, "whole").end().code == 0
    ended = job(tmp_path / "job", ranks, layout, "full", "die").end()
    assert ended.code == 1
    assert flushed(ended) >= 8, ended.output
    shutil.rmtree(memory)
    memory.mkdir()
    ended = job(tmp_path / "job", ranks, layout, name="again").end()
    assert ended.code == 0
    assert f"resumes from step {flushed(Ended(0, (tmp_path / 'job' / 'console').read_text()))}" in ended.output
    assert same(tmp_path / "whole" / "end.ckpt", tmp_path / "job" / "end.ckpt")
