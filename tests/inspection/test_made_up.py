"""Folders that nobody's job wrote: refused by name, at once and in little memory, by every command and by a resume."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import resource
import shutil
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from launcher import run_world

from inspection._forge import Forged, sealed, sealed_text
from inspection._runs import SGD, Small, train
from lightning_moe_ckpt.callbacks import DenseCheckpoint
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.errors import CheckpointError

TERABYTE = 2**40
MEMORY = 64 * 2**20
THREAD = 8 * 2**20
"""Of a thread's stack, which counts as memory that was asked for."""
DEEP = b"[" * 100_000 + b"]" * 100_000

Forge = Callable[[Forged], "str | Path"]
"""Spoils a run; the name that a message must have."""


def sparse(path: Path, nbytes: int = TERABYTE) -> Path:
    """So large a file that reading it would take an hour, and a disk's worth of memory."""
    with path.open("r+b") as file:
        file.truncate(nbytes)
    return path


def replaced(path: Path, make: Callable[[Path], object]) -> Path:
    path.unlink()
    make(path)
    return path


def touched(path: Path) -> Path:
    path.touch()
    return path


def listen(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o20600, os.makedev(1, 5))  # /dev/zero: it has no end
    except PermissionError:
        pytest.skip("this user may not make devices")


def moved(run: Forged, path: Path) -> Path:
    """A link that leads out of the run's folder."""
    target = run.root.with_name(f"moved-{path.name}")
    path.rename(target)
    path.symlink_to(target)
    return path


def large_segment(run: Forged) -> Path:
    """A file of a terabyte that marker and manifest vouch for, as far as sizes go."""
    sparse(run.segment)

    def record(line: Any) -> None:
        nbytes = TERABYTE - line["rows"][-1][-3]
        assign(nbytes=nbytes, numel=nbytes, global_shape=[nbytes], dtype="U8")(line["rows"][-1])

    run.change_marker(lambda body: body["segments"][0].update(nbytes=TERABYTE), records=record)
    run.change_commit(lambda body: body.update(nbytes=TERABYTE))
    return run.segment


def row(change: Callable[[list[Any]], object]) -> Callable[[Forged], str]:
    """Something else in what the marker says of the first parameter."""

    def forge(run: Forged) -> str:
        run.change_marker(lambda _: None, records=lambda line: change(line["rows"][0]))
        return run.marker.name

    return forge


def first(said: str = "", **values: object) -> Callable[[Forged], str]:
    """Of the first parameter, in the marker; a message has its name, or its record's with `said` behind."""

    def forge(run: Forged) -> str:
        names: list[str] = []

        def change(record: list[Any]) -> None:
            assign(**values)(record)
            names.append(f"{record[0]} {said}" if said else record[3])

        row(change)(run)
        return names[0]

    return forge


def assign(**values: object) -> Callable[[list[Any]], None]:
    columns = [
        "name",
        "operator",
        "kind",
        "fqn",
        "state_key",
        "dtype",
        "global_shape",
        "global_start",
        "numel",
        "offset",
        "nbytes",
        "present",
    ]

    def change(record: list[Any]) -> None:
        for name, value in values.items():
            record[columns.index(name)] = value

    return change


def line_of_marker(line: bytes) -> Callable[[Forged], str]:
    def forge(run: Forged) -> str:
        run.change_marker(lambda _: None, line=line)
        return run.marker.name

    return forge


def plan(text: str) -> Callable[[Forged], str]:
    def forge(run: Forged) -> str:
        run.change_policy(lambda body: body["policy"].update(plan=text))
        return run.commit.parent.name

    return forge


def bomb(run: Forged) -> str:
    """A journal whose text names one array ten thousand times."""
    node = f'["A","|u1",[{600}]'
    count = 90
    text = f'[1,["l",{node}],{",".join([f"{node},0]"] * count)}]]'.encode()
    run.put_journal(struct.pack("<QQ", len(text), 600) + text + bytes(600))
    return "journal"


def far_entry(run: Forged) -> str:
    name = f"{10**18 - 1:020d}.json"
    (run.root / "_log" / name).touch()
    return name


CASES: dict[str, Forge] = {
    "pipe as log entry": lambda run: replaced(run.log, os.mkfifo),
    "pipe as manifest": lambda run: replaced(run.commit, os.mkfifo),
    "pipe as marker": lambda run: replaced(run.marker, os.mkfifo),
    "pipe as segment": lambda run: replaced(run.segment, os.mkfifo),
    "socket as marker": lambda run: replaced(run.marker, listen),
    "device as segment": lambda run: replaced(run.segment, device),
    "device as log entry": lambda run: replaced(run.log, device),
    "folder as log entry": lambda run: replaced(run.log, Path.mkdir),
    "link as marker": lambda run: moved(run, run.marker),
    "link as segment": lambda run: moved(run, run.segment),
    "link to itself": lambda run: replaced(run.marker, lambda path: path.symlink_to(path.name)),
    "link as generation": lambda run: moved(run, run.commit.parent),
    "link as step": lambda run: moved(run, run.commit.parent.parent),
    "link as snap": lambda run: moved(run, run.root / "snap"),
    "link as log": lambda run: moved(run, run.root / "_log"),
    "large log entry": lambda run: sparse(run.log),
    "large manifest": lambda run: sparse(run.commit),
    "large marker": lambda run: sparse(run.marker),
    "marker with much behind it": lambda run: sparse(run.marker, 3 * MEMORY),
    "large junk as marker": lambda run: replaced(run.marker, lambda path: sparse(touched(path), 3 * MEMORY)),
    "large segment": lambda run: sparse(run.segment).parent.name,
    "large segment that is vouched for": large_segment,
    "shape": first(global_shape=[2**40, 2**20]),
    "shape without end": first(global_shape=[2**62] * 64),
    "place in the shape": first("ends at element", global_start=2**40),
    "number of elements": row(assign(numel=2**60)),
    "offset": row(assign(offset=2**60)),
    "size": row(assign(nbytes=2**60)),
    "size and elements": row(assign(nbytes=2**42, numel=2**40, global_shape=[2**40])),
    "more than 64 bits": row(assign(global_start=10**30)),
    "type": row(assign(dtype="F4096")),
    "deep records": line_of_marker(b'{"digests":' + DEEP + b"}\n"),
    "deep log entry": lambda run: (run.log.write_bytes(sealed_text(DEEP)), run.log)[1],
    "deep manifest": lambda run: (run.commit.write_bytes(sealed_text(DEEP)), run.commit)[1],
    "deep marker": lambda run: run.put_marker(sealed_text(DEEP)),
    "deep module": lambda run: (run.change_module(DEEP + b"\n"), "")[1],
    "deep plan": plan(DEEP.decode()),
    "plan of another kind": plan("[]"),
    "no plan": plan("no JSON"),
    "no fingerprint": lambda run: (run.change_policy(lambda body: body["policy"].pop("fingerprint")), "")[1],
    "no steps": lambda run: run.change_commit(lambda body: body.update(steps=[])),
    "other log": lambda run: (run.log.write_bytes(sealed({"body": [], "format": 1, "version": True})), run.log)[1],
    "many ranks": lambda run: run.change_commit(lambda body: body.update(world_size=2**60)),
    "far log entry": far_entry,
    "repeated arrays": bomb,
}
SOUND = {"repeated arrays", "no fingerprint"}
"""Digests, sizes and places agree: who reads these values finds out."""
UNREAD = {"deep module", "shape", "shape without end", "large segment"}
"""What a resume does not look at, or knows better."""


def limited(nbytes: int) -> None:
    """No more than so many bytes of memory from here on."""
    status = Path("/proc/self/status").read_text()
    used = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + nbytes, resource.RLIM_INFINITY))


def looked_at(root: Path) -> dict[str, tuple[int, str, float]]:
    """Status, words and seconds of every command, in little memory; those of a resume besides."""
    logging.disable(logging.NOTSET)
    told: dict[str, tuple[int, str, float]] = {}
    commands = [["ls"], ["inspect"], ["verify"], ["gc", "--keep-last", "1", "--verify", "--dry-run"]]
    commands += [["export", str(root.parent / name)] for name in ("m.safetensors", "m.ckpt")]
    for argv in commands:
        limited(MEMORY + 2 * THREAD)
        words, began = io.StringIO(), time.process_time()
        with contextlib.redirect_stdout(words), contextlib.redirect_stderr(words):
            status = main([argv[0], str(root), *argv[1:], "--json"])
        told[" ".join(argv[:2])] = (status, words.getvalue(), time.process_time() - began)
    return told


def resumed(root: Path) -> tuple[int, str]:
    """Whether a resume went on, and what it said: its error, or warnings."""
    limited(4 * MEMORY)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_moe_ckpt").addHandler(handler)
    try:
        train(Small(SGD), DenseCheckpoint(str(root), keep=2), steps=5)
    except CheckpointError as error:
        return 1, f"{error} {said}"
    return 0, str(said)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES)
def test_what_nobody_wrote_is_refused_by_name(tiny_run: Path, tmp_path: Path, case: str) -> None:
    """No other exception, no waiting, no more memory than is needed; `verify` and the resume name what they found."""
    root = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    name = CASES[case](Forged(root))
    name = name.name if isinstance(name, Path) else name

    def work(rank: int) -> tuple[dict[str, tuple[int, str, float]], tuple[int, str]]:
        return looked_at(root), resumed(root)

    ((told, (failed, said)),) = run_world(1, work, timeout=timedelta(seconds=60), process_group=False)
    assert {command: seconds for command, (_, _, seconds) in told.items() if seconds > 1} == {}
    assert {status for status, _, _ in told.values()} <= {0, 1, 2}
    status, words, _ = told["verify"]
    if case not in SOUND:
        assert status != 0
        assert name in words, json.dumps(told)
    assert (not failed) if case in UNREAD else (said and name in said), (failed, said, told)


@pytest.mark.parametrize(
    "text", [b'[1,["d",["a",["T","float32",[1099511627776],"cpu"]]]]', b"[1,[" * 999], ids=["large", "deep"]
)
def test_a_journal_that_cannot_be_read_costs_its_generation(
    tmp_path: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Every digest vouches for it: all ranks find out together, before anything is put back, and use an older one."""
    root = tmp_path / "run"
    train(Small(SGD), DenseCheckpoint(str(root), every_n_steps=1, keep=3, overhead_target=None), steps=3)
    Forged(root).put_journal(struct.pack("<QQ", len(text), 0) + text)
    train(Small(SGD), DenseCheckpoint(str(root), keep=3), steps=4)
    assert "cannot resume from step 3 (incarnation 1), rank 0: A journal of" in caplog.text
    assert "step 2 (incarnation 1) is resumed from, an older generation" in caplog.text
