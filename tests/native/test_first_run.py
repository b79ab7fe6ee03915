"""The first run on a GPU brings back all that could be had: what fails, hangs or is lacking costs nothing else."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import run_world

from ext import first_run
from ext.first_run import (
    SECTIONS,
    Keep,
    Section,
    SectionOutcome,
    main,
    run_apart,
    run_section,
    section_main,
)

LIMIT = timedelta(seconds=60)
FINDS = """
import json, pathlib, sys
pathlib.Path(sys.argv[-1]).write_text(json.dumps({"found": [1, 2]}))
"""
HANGS = """
import faulthandler, signal, subprocess, sys, time
faulthandler.register(signal.SIGUSR1, all_threads=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
def waits_for_ever(): time.sleep(600)
waits_for_ever()
"""


def _python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def _ignore(what: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


def test_a_section_that_dies_costs_no_other(tmp_path: Path) -> None:
    """The document is whole after every section, with what each had found and said until its end."""
    path, seen = tmp_path / "results" / "first-run.json", list[list[str]]()

    def look(what: str, done: int, total: int) -> None:
        seen.append(list(json.loads(path.read_text())["sections"]) if path.exists() else [])

    crash = FINDS + "import os; print('last words', flush=True); os.abort()"
    commands = {
        "build": _python(crash),
        "check": None,
        "resume": _python("raise RuntimeError('other bits')"),
        "env": _python(FINDS),
    }
    outcomes = run_apart(commands, path, look)
    assert {name: outcome.outcome for name, outcome in outcomes.items()} == {
        "build": "FAILED: died by SIGABRT",
        "check": "not run: no CUDA device",
        "resume": "FAILED: RuntimeError: other bits",
        "env": "done",
    }
    assert (outcomes["build"].found, outcomes["build"].said) == ([1, 2], "last words\n")
    assert "Traceback (most recent call last)" in outcomes["resume"].said
    assert seen == [[], ["build"], ["build", "check"], ["build", "check", "resume"]]
    document = json.loads(path.read_text())
    assert {name: SectionOutcome(**section) for name, section in document["sections"].items()} == outcomes
    assert document["machine"]["torch"]


def test_a_section_that_hangs_shows_where_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped at its limit with all that it started; the stacks of its threads are in what it said."""
    monkeypatch.setattr(first_run, "_DUMP_SECONDS", 0.2)
    outcome = run_section(_python(HANGS), timedelta(seconds=2))
    assert outcome.outcome == "FAILED: over its limit of 2 s"
    assert "in waits_for_ever" in outcome.said
    child = Path("/proc", outcome.said.split()[1], "stat")
    deadline = time.monotonic() + 10
    while (
        child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z"
    ):  # a zombie waits for its new parent
        assert time.monotonic() < deadline


def test_an_error_is_told_in_a_line_with_what_was_found_before(tmp_path: Path) -> None:
    """Whatever else is printed on the way out; the whole of it is in what the section said."""
    path = tmp_path / "found.json"

    def work(_: int) -> None:
        def fail(accelerator: str, keep: Keep) -> None:
            keep([1])
            raise ValueError("first line\nsecond line")

        SECTIONS["env"] = Section(fail, LIMIT)
        with pytest.raises(ValueError, match="second line"):
            section_main("env", "cpu", str(path))

    run_world(1, work, process_group=False)
    written = json.loads(path.read_text())
    assert written == {"found": [1], "error": "ValueError: first line"}
    assert first_run._outcome(1, LIMIT, written, "farewell\n") == "FAILED: ValueError: first line"


def _main(argv: Sequence[str]) -> int:
    return run_world(1, lambda _: main(argv), process_group=False, timeout=LIMIT)[0]


without_devices = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@without_devices
def test_without_a_device_each_section_says_so(tmp_path: Path) -> None:
    """In the words that somebody looks for, not in a traceback of the driver."""
    chosen = [name for name, section in SECTIONS.items() if section.needs_device]
    assert chosen == ["check", "tests", "copies", "kernels", "memcheck", "racecheck"]
    assert _main(["--only", ",".join(chosen), "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("first-run-*.json")
    sections = json.loads(path.read_text())["sections"]
    assert {name: each["outcome"] for name, each in sections.items()} == dict.fromkeys(
        chosen, "not run: no CUDA device"
    )


@without_devices
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--only", "check,sorting"], "no section sorting"),
        (["--accelerator", "gpu"], "needs a CUDA device for each of 1"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(options: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(options)
    assert left.value.code == 2
    assert said in capfd.readouterr().err


def _found(section: str, accelerator: str, path: Path) -> Any:
    """Of a section in a process forked from this one, or in a new one, since CUDA survives no fork."""
    if accelerator == "gpu":
        outcome = run_section(first_run._command(section, "gpu"), SECTIONS[section].limit)
        assert outcome.outcome == "done", outcome.said
        return outcome.found

    def work(_: int) -> None:
        section_main(section, accelerator, str(path))

    run_world(1, work, process_group=False, timeout=LIMIT)
    return json.loads(path.read_text())["found"]


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_killed_and_resumed_run_ends_in_the_same_bits(accelerator: str, tmp_path: Path) -> None:
    """State, random numbers of the device and every loss, out of the memory of the dead process and out of storage."""
    found = _found("resume", accelerator, tmp_path / "found.json")
    assert [resumed["policy"] for resumed in found] == ["sparse", "dense"] * 2  # in two precisions
    for resumed, tier in zip(found, ["host", "storage"] * 2, strict=True):
        assert resumed["accelerator"] == accelerator
        assert resumed["unrepeatable"] == []
        assert resumed["differs"] == []
        assert resumed["resumed_from"] > 0
        assert [*resumed["restored_from"]] == [tier]
        assert resumed["num_tensors"] > 100


def test_the_environment_is_read_on_any_machine(tmp_path: Path) -> None:
    """Whether there is a device or not."""
    found = _found("env", "cpu", tmp_path / "found.json")
    assert {"machine", "packages", "devices", "nvcc", "shared memory", "limits", "attributes"} <= found.keys()
