"""Directories that were copied or put back: only what descends from the log as it stands is restored, or written."""

from __future__ import annotations

import json
import logging
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from stored._runs import begin, save, steps, write

from lightning_moe_ckpt.errors import ConfigurationError, Fenced, NoUsableGeneration, StorageRefused
from lightning_moe_ckpt.storage import (
    Backend,
    GenerationId,
    PosixBackend,
    Resume,
    Retention,
    RunStore,
    RunView,
    collect_garbage,
    repair_log,
)
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


# What is lost must not look like nothing.


@pytest.mark.parametrize("resume", ["auto", "must", "memory"])
def test_generations_without_a_log_are_not_the_beginning_of_a_run(place: Path, resume: Resume) -> None:
    store = begin(PosixBackend(place))
    for step in (10, 20):
        save(store, step, KEEP)
    shutil.rmtree(place / "_log")
    before = sorted(place.rglob("*"))
    with pytest.raises(
        NoUsableGeneration, match=r"2 committed generations.*no log.*repair.*resume='never'.*another URL"
    ):
        RunStore.open(PosixBackend(place), resume=resume)
    assert sorted(each for each in place.rglob("*") if "_probe" not in str(each)) == before


def test_generations_that_no_log_names_are_never_deleted(place: Path) -> None:
    """A run that begins beside them keeps off, and so does a garbage collector; what a log names as replaced goes."""
    lost = begin(PosixBackend(place))
    save(lost, 10, KEEP)
    shutil.rmtree(place / "_log")
    replaced = RunStore.open(PosixBackend(place), resume="never")
    replaced.candidates()
    replaced.open_epoch(None)
    save(replaced, 11, KEEP)
    new = RunStore.open(PosixBackend(place), resume="never")
    new.candidates()
    new.open_epoch(None)
    for step in (1, 2, 3, 4):
        save(new, step, Retention(last=1))
    found = collect_garbage(PosixBackend(place), Retention(last=1))
    assert {each.generation: each.reason for each in found.stays}[
        lost.name(10)
    ] == "of a run that the log does not name"
    left = {each.generation for each in RunView.open(PosixBackend(place)).generations()}
    assert left == {lost.name(10), new.name(4)}


def test_a_log_without_its_generations_is_not_the_beginning_of_a_run(place: Path) -> None:
    """After the first commit already, and after any number; a run that has committed nothing begins again."""
    store = begin(PosixBackend(place))
    assert begin(PosixBackend(place)).candidates() == []
    store = begin(PosixBackend(place))
    assert store.unreadable == []
    for step in (10, 20):
        save(store, step, KEEP)
        shutil.move(place / "snap", place / "elsewhere")
        again = RunStore.open(PosixBackend(place), resume="auto")
        assert again.candidates() == []
        ((_, reason),) = again.unreadable
        assert "none of them is there" in reason
        shutil.move(place / "elsewhere", place / "snap")


@pytest.mark.parametrize("log", [True, False], ids=["with a log", "without"])
def test_folders_that_are_links_are_named(place: Path, tmp_path: Path, log: bool) -> None:
    """Somebody moved generations to another disk."""
    store = begin(PosixBackend(place))
    for step in (10, 20):
        save(store, step, KEEP)
    for folder in ("snap/000000000020", store.name(10).prefix.rstrip("/")):
        move_away(place / folder, tmp_path)
    if not log:
        shutil.rmtree(place / "_log")
    with pytest.raises(StorageRefused, match="is a link"):
        RunStore.open(PosixBackend(place), resume="auto").candidates()


def move_away(folder: Path, to: Path) -> None:
    target = to / f"moved-{folder.name}"
    shutil.move(folder, target)
    folder.symlink_to(target)


def test_a_log_is_made_again_from_manifests(place: Path) -> None:
    """First it is only shown. What a later life left behind stays behind, and what is damaged is named."""
    first = begin(PosixBackend(place))
    for step in (10, 20, 30):
        save(first, step, KEEP)
    second = begin(PosixBackend(place), at=20)
    save(second, 25, Retention(last=4))
    late = PosixBackend(place)
    assert not [*place.glob("snap/*30/*/_COMMITTED")], "the second has deleted what it left behind"
    shutil.rmtree(place / "_log")
    shown = repair_log(late, dry_run=True)
    assert (shown.written, list(shown.usable)) == (False, [second.name(25), first.name(20), first.name(10)])
    assert not (place / "_log").exists()
    done = repair_log(late, dry_run=False)
    assert (done.written, done.usable, done.run_id) == (True, shown.usable, first.run_id)
    with pytest.raises(Fenced):
        second.commit(write(second, 26), timeout=NOW)
    again = begin(PosixBackend(place))
    assert (again.run_id, again.epoch, steps(again)) == (first.run_id, 3, [10, 20, 25])
    for step in (30, 35):
        save(again, step, Retention(last=1))
    assert steps(begin(PosixBackend(place))) == [35]
    with pytest.raises(ConfigurationError, match="nothing to repair"):
        repair_log(late, dry_run=False)


def test_a_log_that_cannot_be_read_is_made_again_behind_what_is_there(place: Path, tmp_path: Path) -> None:
    """Of two lives of one number the one that committed last counts; another run's and damaged ones are left out."""
    hung, successor = overtaken(place, tmp_path)
    save(successor, 20, KEEP)
    late = publish_late(place, hung, 15)
    backend = PosixBackend(place)
    for entry in backend.list("_log/"):
        backend.put(entry.key, b"spoilt")
    manifest = place / f"{successor.name(20).prefix}_COMMITTED"
    (place / "snap/000000000050/e000001").mkdir(parents=True)
    (place / "snap/000000000050/e000001/_COMMITTED").write_bytes(manifest.read_bytes())
    found = repair_log(backend, dry_run=False)
    assert successor.name(20) in found.usable or late in found.usable
    assert GenerationId(step=50, epoch=1) in found.left_out
    assert len([each for each in (successor.name(20), late) if each in found.left_out]) == 1
    assert steps(begin(PosixBackend(place)))[-1] == max(found.usable).step


def test_nothing_is_made_of_nothing(place: Path) -> None:
    with pytest.raises(NoUsableGeneration, match="no committed generation"):
        repair_log(PosixBackend(place), dry_run=True)
