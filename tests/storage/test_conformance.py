"""`moe-ckpt doctor URL` finds out what a place for checkpoints keeps, says what that means, and leaves nothing there."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from servers._s3 import S3Server, running

from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.inspection import _conformance
from lightning_moe_ckpt.inspection._conformance import Conformance, examine_url
from lightning_moe_ckpt.storage import open_backend


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer keys; that all of them are listed is not new to these servers."""
    monkeypatch.setattr(_conformance, "_PAGE", 20)
    monkeypatch.setattr(_conformance, "_ROUNDS", 3)


def states(found: Conformance) -> dict[str, str]:
    return {check.name: check.state for check in found.checks}


EXPECTED = {
    "moto": ("fenced", {}),
    "ministack": ("fenced", {}),
    "rclone": ("unfenced", {"create-exclusive": "weaker", "race of creators": "weaker"}),
}


@pytest.mark.parametrize("name", ["moto", pytest.param("ministack", marks=pytest.mark.soak), "rclone"])
@pytest.mark.usefixtures("quick")
def test_stores_are_told_apart(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the study found of these servers by hand, found by the command; the run stored there is untouched."""
    if name == "moto":  # it looks and stores in two steps: two creators at once may both be told that they made a key
        monkeypatch.setattr(_conformance, "_RACERS", 1)
    with running(name, tmp_path) as server:
        url = server.url()
        backend = open_backend(url, storage_options=server.storage_options)
        backend.put("snap/a", b"of a run")
        found = examine_url(url, storage_options=server.storage_options)
        verdict, exceptions = EXPECTED[name]
        assert found.verdict == verdict, found
        assert {name: state for name, state in states(found).items() if state != "good"} == exceptions
        said = {check.name: check.found for check in found.checks}
        assert ("refused" in said["small parts"]) == (name == "moto")
        assert ("refuses" in said["wrong checksums"]) == (name != "moto")
        assert ("file systems" in said["keys a and a/b"]) == (name == "rclone")
        assert [entry.key for entry in backend.list("")] == ["snap/a"]
        assert unfinished(server, url) == 0


def unfinished(server: S3Server, url: str) -> int:
    from lightning_moe_ckpt.storage import ObjectBackend

    uploads = ObjectBackend(url, storage_options=server.storage_options).unfinished
    assert uploads is not None
    return len(uploads.list(""))


def test_a_local_path_is_fenced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With all its 1100 keys; for people and for programs."""
    assert main(["doctor", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "Fenced: checkpoints are safe here." in shown
    assert "1100 keys are listed whole" in shown
    assert main(["doctor", str(tmp_path / "run"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["url"]) == ("fenced", str(tmp_path / "run"))
    assert {check["state"] for check in document["checks"]} == {"good", "unknown"}
    assert not any((tmp_path / "run").iterdir())


# Stores that break a promise: each is found out, by the check that is for it.


class _Broken(MemoryFileSystem):  # type: ignore[misc]
    """A store with one defect."""

    protocol = "broken"
    store: dict[str, Any] = {}  # noqa: RUF012 - as the base class declares it
    pseudo_dirs = [""]  # noqa: RUF012 - as the base class declares it
    defect = ""
    seen: dict[str, bytes] = {}  # noqa: RUF012 - as the base class declares it
    known: dict[str, Any] = {}  # noqa: RUF012 - as the base class declares it

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
        if self.defect == "careless":
            mode = "overwrite"
        if self.defect == "racy" and mode == "create":
            free = not self.exists(path)
            time.sleep(0.02)  # others look now as well
            if not free:
                raise FileExistsError(path)
            mode = "overwrite"
        if self.defect == "truncates" and len(value) > 2**20:
            value = value[:-1] + b"?"
        super().pipe_file(path, value, mode=mode)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: object) -> bytes:
        data = bytes(super().cat_file(path))
        if self.defect == "stale":
            data = self.seen.setdefault(path, data)
        if self.defect == "ranges" and start:
            start, end = start - 1, (end or len(data)) - 1
        return data[start:end]

    def ls(self, path: str, *args: Any, **kwargs: Any) -> Any:
        if self.defect == "listing lags" and path in self.known:
            return self.known[path]
        found = super().ls(path, *args, **kwargs)
        if path.endswith("/listing"):
            self.known[path] = found
        return found[:10] if self.defect == "one page" else found


@pytest.mark.parametrize(
    ("defect", "check", "verdict"),
    [
        ("", "", "fenced"),
        ("careless", "create-exclusive", "unfenced"),
        ("racy", "race of creators", "unsafe"),
        ("stale", "read after write", "unsafe"),
        ("truncates", "large objects", "unsafe"),
        ("ranges", "ranges", "unsafe"),
        ("listing lags", "listing", "unsafe"),
        ("one page", "more than 1000 keys", "unsafe"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_every_defect_is_found_by_its_check(
    defect: str, check: str, verdict: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the verdict says whether checkpoints may stay."""
    fsspec.register_implementation("broken", _Broken, clobber=True)
    monkeypatch.setattr(_Broken, "defect", defect)
    for memory in (_Broken.store, _Broken.seen, _Broken.known):
        memory.clear()
    status = main(["doctor", f"broken://{uuid.uuid4().hex}/run", "--json"])
    document = json.loads(capsys.readouterr().out)
    found = {each["name"]: each["state"] for each in document["checks"]}
    assert document["verdict"] == verdict
    assert status == (0 if verdict == "fenced" else 1)
    if check:
        assert found[check] == ("weaker" if verdict == "unfenced" else "broken")
    assert document["meaning"].startswith(verdict.capitalize())


def test_a_place_that_cannot_be_written_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not check by check; in JSON too."""
    (tmp_path / "taken").write_bytes(b"")
    assert main(["doctor", str(tmp_path / "taken" / "run")]) == 2
    error = capsys.readouterr()
    assert error.out == ""
    assert error.err.count("\n") == 1
    assert main(["doctor", str(tmp_path / "taken" / "run"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "StorageRefused"


def _exit(argv: list[str]) -> None:
    sys.exit(main(argv))


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGTERM])
def test_nothing_is_left_when_interrupted(number: signal.Signals, tmp_path: Path) -> None:
    """At a moment when a thousand objects are being written."""
    process = multiprocessing.get_context("fork").Process(target=_exit, args=(["doctor", str(tmp_path / "run")],))
    process.start()
    try:
        end = time.monotonic() + 120
        while not list((tmp_path / "run").glob("_doctor/*/pages/*")):
            assert time.monotonic() < end
            assert process.is_alive()
            time.sleep(0.01)
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join(120)
        assert process.exitcode
    finally:
        process.kill()
        process.join(30)
    assert not any((tmp_path / "run").iterdir())


@pytest.mark.usefixtures("quick")
def test_what_a_killed_doctor_left_goes_at_the_next_visit(tmp_path: Path) -> None:
    """Not what one that works at this moment has there."""
    backend = open_backend(str(tmp_path))
    now = int(time.time())
    for age in (0, 10_000):
        backend.put(f"_doctor/{now - age}-{'0' * 32}/pages/00001", b"x")
    (tmp_path / "_doctor" / "strange").write_bytes(b"not of a doctor")
    examine_url(str(tmp_path))
    left = sorted(os.fspath(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == [f"_doctor/{now}-{'0' * 32}/pages/00001", "_doctor/strange"]


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
