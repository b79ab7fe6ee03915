"""Directories that were copied or put back: only what descends from the log as it stands is restored, or written."""

from __future__ import annotations

import json
import logging
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from stored._runs import begin, save, steps, write

from lightning_moe_ckpt.errors import Fenced
from lightning_moe_ckpt.storage import Backend, GenerationId, PosixBackend, Retention, RunStore, collect_garbage
from lightning_moe_ckpt.storage._commit import await_markers, publish
from lightning_moe_ckpt.storage._json import decode_any, encode
from lightning_moe_ckpt.storage._log import History, Log
from lightning_moe_ckpt.storage._names import log_key

KEEP = Retention(last=3)
NOW = timedelta()


@pytest.fixture(autouse=True)
def _named_lives() -> None:
    """Each life has a name of its own here."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "run"


def put_back(backup: Path, place: Path) -> None:
    shutil.rmtree(place)
    shutil.copytree(backup, place)


def history(place: Path) -> History:
    found = Log(PosixBackend(place)).read()
    assert found is not None
    return found


def publish_late(place: Path, store: RunStore, step: int) -> GenerationId:
    """A job that looked at the log before it was fenced commits afterwards."""
    marker = write(store, step)
    backend = PosixBackend(place)
    return publish(backend, await_markers(backend, marker, timeout=NOW), history(place)).generation


def overtaken(place: Path, tmp_path: Path) -> tuple[RunStore, RunStore]:
    """A job that hangs, and one that was started after a backup was put back; to both this is epoch 2, from step 10."""
    save(begin(PosixBackend(place)), 10, KEEP)
    shutil.copytree(place, tmp_path / "backup")
    hung = begin(PosixBackend(place))
    put_back(tmp_path / "backup", place)
    successor = begin(PosixBackend(place))
    assert (hung.epoch, successor.epoch) == (2, 2)
    assert hung.life != successor.life
    return hung, successor


def test_a_job_that_wakes_up_after_a_backup_was_put_back_is_fenced(place: Path, tmp_path: Path) -> None:
    """Its log was longer than its successor's is now, and both have the same number: it commits and deletes nothing."""
    save(begin(PosixBackend(place)), 10, KEEP)
    shutil.copytree(place, tmp_path / "backup")
    hung = begin(PosixBackend(place))
    for step in (20, 30, 40, 50):
        save(hung, step, Retention(last=2))
    put_back(tmp_path / "backup", place)
    successor = begin(PosixBackend(place))
    late = write(hung, 60)
    for _ in range(2):
        with pytest.raises(Fenced, match="put back to an older state"):
            hung.commit(late, timeout=NOW)
        with pytest.raises(Fenced, match="put back to an older state"):
            hung.retain(Retention(last=1))
        save(successor, 20 + len(steps(successor)), KEEP)  # its log gets as long as the other's was
    assert steps(successor) == [10, 21, 22]


def test_entries_of_a_successor_are_not_taken_for_those_of_a_garbage_collector(place: Path, tmp_path: Path) -> None:
    """They name the same run and epoch, behind ours."""
    hung, successor = overtaken(place, tmp_path)
    for step in (20, 30, 40):
        save(successor, step, Retention(last=1))
    with pytest.raises(Fenced):
        hung.commit(write(hung, 25), timeout=NOW)
    collect_garbage(PosixBackend(place), Retention(last=1))
    save(successor, 50, Retention(last=1))


def test_a_job_is_fenced_when_its_checkpoints_were_put_back_and_nobody_has_started(place: Path, tmp_path: Path) -> None:
    save(begin(PosixBackend(place)), 10, KEEP)
    shutil.copytree(place, tmp_path / "backup")
    hung = begin(PosixBackend(place))
    put_back(tmp_path / "backup", place)
    with pytest.raises(Fenced, match="is gone"):
        hung.commit(write(hung, 20), timeout=NOW)


def test_a_damaged_newest_entry_fences_nobody(place: Path) -> None:
    """Who wrote it says it again with the next one."""
    store = begin(PosixBackend(place))
    backend = PosixBackend(place)
    backend.put(backend.list("_log/")[-1].key, b"spoilt")
    for step in (10, 20, 30):
        save(store, step, Retention(last=1))
    assert steps(begin(PosixBackend(place))) == [30]


def test_what_an_overtaken_job_commits_is_never_taken(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither beside its successor's generation of the same step, of which no byte changes, nor when it is newer."""
    hung, successor = overtaken(place, tmp_path)
    save(successor, 20, KEEP)
    late = [publish_late(place, hung, step) for step in (20, 30)]
    again = RunStore.open(PosixBackend(place), resume="must")
    with caplog.at_level(logging.WARNING):
        assert again.candidates()[0].generation == successor.name(20)
    said = [record.message for record in caplog.records]
    assert all(any(str(each) in line and "does not name" in line for line in said) for each in late)
    (segment,) = again.read_marker(again.candidates()[0], 0).segments
    again.read_segment(segment, memoryview(bytearray(segment.nbytes)))


def test_nobody_deletes_what_the_log_does_not_name_before_it_is_left_behind(place: Path, tmp_path: Path) -> None:
    """It may be the only good copy, if it is the log that is wrong."""
    hung, successor = overtaken(place, tmp_path)
    late = publish_late(place, hung, 30)
    for step in (20, 25):
        save(successor, step, Retention(last=1))
        collect_garbage(PosixBackend(place))
        assert PosixBackend(place).list(late.prefix)
    for step in (35, 40):
        save(successor, step, Retention(last=1))
    assert not PosixBackend(place).list(late.prefix)


def test_only_generations_that_the_log_does_not_name_are_no_reason_to_begin_from_nothing(place: Path) -> None:
    """A log that was put back to before the first commit, beside generations that were not."""
    store = begin(PosixBackend(place))
    for step in (10, 20):
        save(store, step, KEEP)
    shutil.rmtree(place / "_log")
    fresh = PosixBackend(place)
    assert Log(fresh).append({"type": "run"}, History(run_id=store.run_id, first_epoch=1, last_epoch=1))
    again = RunStore.open(fresh, resume="auto")
    assert again.candidates() == []
    assert [where for where, _ in again.unreadable] == [str(store.name(20)), str(store.name(10))]


def test_copies_of_a_directory_go_on_apart(place: Path, tmp_path: Path) -> None:
    """Both open epoch 2; what one wrote is nothing to the other, wherever it gets."""
    save(begin(PosixBackend(place)), 10, KEEP)
    shutil.copytree(place, tmp_path / "copy")
    here, there = begin(PosixBackend(place)), begin(PosixBackend(tmp_path / "copy"))
    save(here, 20, KEEP)
    save(there, 20, KEEP)
    assert here.why_dead(there.name(20)) is not None
    shutil.copytree(tmp_path / "copy" / "snap", place / "snap", dirs_exist_ok=True)
    assert RunStore.open(PosixBackend(place), resume="must").candidates()[0].generation == here.name(20)


def as_older_release(backend: Backend) -> None:
    """Rewrite the log in the form that knows of no lives."""
    for index, entry in enumerate(backend.list("_log/")):
        _, fields = decode_any(backend.get(entry.key), kind="log", where=entry.key, versions=(2,))
        past = fields.plain("history")
        body = {"index": index, "event": fields.plain("event"), "nonce": fields.text("nonce")}
        for key in ("key", "replaced", "has_commits"):
            del past[key]
        for row in (*past["cuts"], *past["kept"]):  # type: ignore[misc]
            del row["life"]
        backend.put(entry.key, encode("log", {**body, "history": past}))


def test_runs_of_older_releases_go_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their lives have no names; the first life of this release has one, and continues what they began."""
    monkeypatch.setattr("lightning_moe_ckpt.storage._run.new_life", lambda: "")
    old = begin(PosixBackend(place))
    for step in (10, 20, 30):
        save(old, step, Retention(last=1, every_n_steps=20))
    assert (place / "snap/000000000030/e000001/_COMMITTED").exists()
    as_older_release(PosixBackend(place))
    monkeypatch.undo()
    assert json.loads((place / log_key(1)).read_bytes())["document"]["version"] == 1
    store = begin(PosixBackend(place))
    with pytest.raises(Fenced):
        save(old, 40, KEEP)
    assert steps(store) == [10, 20, 30]
    assert len(store.life) == 12
    save(store, 40, Retention(last=1, every_n_steps=20))
    assert steps(begin(PosixBackend(place))) == [10, 20, 40]
    assert len(history(place).key) == 32
