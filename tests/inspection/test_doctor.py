"""`moe-ckpt doctor` says what is in use and why not, for people and for programs."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.native import _doctor, _library, examine

NAMES = [
    *("compiled CPU part", "compiled CUDA part", "C++ compiler", "CUDA compiler", "CUDA devices"),
    *("shared memory", "locked memory", "huge pages", "memory nodes"),
]


def test_json_holds_every_finding(capsys: pytest.CaptureFixture[str]) -> None:
    """One entry per thing that was looked at, each with what was found."""
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["name"] for finding in findings] == NAMES
    assert all(finding["found"] and finding["state"] in ("good", "slower", "absent") for finding in findings)


def test_table_tells_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """Every name and state, and reasons in full."""
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in NAMES)


def test_switched_off_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no advice to build what is there already."""
    monkeypatch.setenv("MOE_CKPT_NATIVE", "0")
    _library.status.cache_clear()
    try:
        part = examine()[0]
    finally:
        _library.status.cache_clear()
    assert (part.state, part.advice) == ("absent", "")
    assert "torch does its work: switched off by MOE_CKPT_NATIVE=0" in part.found


def test_what_is_missing_comes_with_what_follows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No compiler, no shared memory."""
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setattr(_doctor, "_SHARED_MEMORY", tmp_path / "nowhere")
    found = {each.name: each for each in examine()}
    assert (found["C++ compiler"].state, found["C++ compiler"].advice) == ("absent", "needed to build")
    assert found["shared memory"].advice == "mount a tmpfs there"
    assert (found["huge pages"].state, found["huge pages"].advice) == ("absent", "")


@pytest.mark.parametrize(("taken", "ahead"), [(0, True), (0, False), (2**21, True)])
def test_huge_pages_are_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, taken: int, ahead: bool) -> None:
    """The remedy is said where there are none; nothing is left behind."""
    monkeypatch.setattr(_doctor, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(_doctor, "take_huge_pages", lambda *_: taken)
    monkeypatch.setattr(_doctor, "populate", lambda *_: ahead)
    (found,) = (each for each in examine() if each.name == "huge pages")
    assert (found.state, "huge=within_size" in found.advice) == (("good", False) if taken else ("slower", True))
    assert str(tmp_path) in found.found
    assert ("mapped ahead" in found.found) == (not ahead)
    assert not [*tmp_path.iterdir()]


def test_a_full_tmpfs_hides_no_other_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be tried is said."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_doctor, "take_huge_pages", full)
    found = {each.name: each for each in examine()}
    assert [*found] == NAMES
    assert "No space left" in found["huge pages"].found


def test_a_small_tmpfs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's default of 64 MB holds no ring."""
    monkeypatch.setattr(_doctor, "_SMALL_NBYTES", 2**60)
    found = {each.name: each for each in examine()}
    if not _doctor._SHARED_MEMORY.is_dir():
        pytest.skip("no /dev/shm")
    assert "--shm-size" in found["shared memory"].advice
