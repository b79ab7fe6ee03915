"""`moe-ckpt shm`: what is in shared memory, who holds it, and that only what nobody holds is cleared."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from door import DIRECTORY_VARIABLE, SharedFile
from launcher import exit_after

from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.inspection import _shared_memory
from lightning_moe_ckpt.tiers import shared_name

TAGS = ("a" * 32, "b" * 32)


@contextmanager
def held(ring: Path) -> Iterator[int]:
    """A process that holds a ring, by its number."""
    told, tell = os.pipe()

    def hold() -> SharedFile | None:
        taken = SharedFile.take_over(ring)
        os.write(tell, b"held")
        signal.pause()
        return taken

    holder = os.fork()
    if holder == 0:
        exit_after(hold)
    try:
        assert os.read(told, 4) == b"held"
        yield holder
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.close(told)
        os.close(tell)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Rings of two runs, that of the first with a marker, a folder of a benchmark, and a file that is nobody's."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    rings = {tag: tmp_path / shared_name(tag, 0) for tag in TAGS}
    for ring in rings.values():
        SharedFile.create(ring, 3 * 2**20).close(unlink=False)
    (tmp_path / f"{rings[TAGS[0]].name}.128.i1-0123456789ab.done").write_bytes(b"x" * 2**20)
    folder = tmp_path / "moe-ckpt-bench-abc"
    folder.mkdir()
    (folder / "ring").write_bytes(b"y" * 2**19)
    (tmp_path / "other").write_bytes(b"z")
    return {"first": rings[TAGS[0]], "second": rings[TAGS[1]], "folder": folder, "other": tmp_path / "other"}


def shm(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> dict[str, Any]:
    assert main(["shm", *argv, "--json"]) == status
    return dict(json.loads(capsys.readouterr().out))


def test_it_lists_run_rank_step_size_and_who_holds_it(
    memory: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A ring with its markers is one line; what is not ours is none."""
    found = {Path(each["path"]): each for each in shm(capsys)["found"]}
    assert found.keys() == {memory["first"], memory["second"], memory["folder"]}
    first = found[memory["first"]]
    assert (first["tag"], first["rank"], first["what"], first["step"]) == (TAGS[0], 0, "ring", 128)
    assert first["nbytes"] == 4 * 2**20
    assert first["held_by"] == []
    assert first["age_seconds"] < 60
    assert main(["shm"]) == 0
    said = capsys.readouterr().out
    assert "4.00 MiB" in said
    assert "nobody" in said


def test_it_clears_what_nobody_holds_and_only_that(
    memory: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that lives holds the second ring; a dry run removes nothing; `--force` removes that one too."""
    with held(memory["second"]) as holder:
        found = {Path(each["path"]): each for each in shm(capsys)["found"]}
        assert found[memory["second"]]["held_by"] == [holder]
        assert shm(capsys, "--clear", "--dry-run")["would_clear"] == [str(memory["first"])]
        assert memory["first"].exists()
        assert shm(capsys, "--clear")["cleared"] == [str(memory["first"])]
        assert not list(memory["first"].parent.glob(f"{memory['first'].name}*"))
        assert memory["second"].exists()
        assert memory["folder"].exists(), "it changed a moment ago: a benchmark may be between two fits"
        monkeypatch.setattr(_shared_memory, "_SETTLED_SECONDS", 0.0)
        assert shm(capsys, "--clear")["cleared"] == [str(memory["folder"])]
        assert shm(capsys, "--force")["cleared"] == [str(memory["second"])]
    assert memory["other"].exists()


def test_what_another_user_has_is_left_alone(
    memory: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is not root can neither see who holds it nor remove it."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    found = shm(capsys, "--clear")
    assert found["cleared"] == []
    assert {each["why_kept"] for each in found["found"]} == {"another user's"}


def test_a_url_names_one_run(
    dense_run: tuple[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of its memory follow from its log; there is none where the run has ended."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    SharedFile.create(tmp_path / shared_name(TAGS[0], 0), 4096).close(unlink=False)
    assert len(shm(capsys)["found"]) == 1
    assert shm(capsys, dense_run[0])["found"] == []
