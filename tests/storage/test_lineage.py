"""Directories that were copied or put back: only what descends from the log as it stands is restored, or written."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest
from door import History, Log, await_markers, publish
from stored._crashes import Crashed, CrashingBackend
from stored._runs import begin, save, steps, write
from stored._segments import read_segment

from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, Fenced, NoUsableGeneration, StorageRefused
from lightning_moe_ckpt.storage import (
    Commit,
    GenerationId,
    PosixBackend,
    Resume,
    Retention,
    RunStore,
    RunView,
    collect_garbage,
    repair_log,
)

KEEP = Retention(last=3)
NOW = timedelta()


@pytest.fixture(autouse=True)
def _named_lives() -> None:
    """Each incarnation has a name of its own here."""


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


def publish_late(place: Path, store: RunStore, step: int, unix_time: int = 0) -> GenerationId:
    """A job that looked at the log before it was fenced commits afterwards."""
    marker = write(store, step, unix_time)
    backend = PosixBackend(place)
    return publish(backend, await_markers(backend, marker, timeout=NOW), history(place)).generation


def overtaken(place: Path, tmp_path: Path) -> tuple[RunStore, RunStore]:
    """A job that hangs, and one that was started after a backup was put back; to both this is incarnation 2, from step 10."""
    save(begin(PosixBackend(place)), 10, KEEP)
    shutil.copytree(place, tmp_path / "backup")
    hung = begin(PosixBackend(place))
    put_back(tmp_path / "backup", place)
    successor = begin(PosixBackend(place))
    assert (hung.incarnation, successor.incarnation) == (2, 2)
    assert hung.nonce != successor.nonce
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
    """They name the same run and incarnation, behind ours."""
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
    read_segment(again, segment, memoryview(bytearray(segment.nbytes)))


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
    assert Log(fresh).append({"type": "run"}, History(run_id=store.run_id, first_incarnation=1, last_incarnation=1))
    again = RunStore.open(fresh, resume="auto")
    assert again.candidates() == []
    assert [where for where, _ in again.unreadable] == [str(store.name(20)), str(store.name(10))]


def test_copies_of_a_directory_go_on_apart(place: Path, tmp_path: Path) -> None:
    """Both open incarnation 2; what one wrote is nothing to the other, wherever it gets."""
    save(begin(PosixBackend(place)), 10, KEEP)
    shutil.copytree(place, tmp_path / "copy")
    here, there = begin(PosixBackend(place)), begin(PosixBackend(tmp_path / "copy"))
    save(here, 20, KEEP)
    save(there, 20, KEEP)
    assert here.why_dead(there.name(20)) is not None
    shutil.copytree(tmp_path / "copy" / "snap", place / "snap", dirs_exist_ok=True)
    assert RunStore.open(PosixBackend(place), resume="must").candidates()[0].generation == here.name(20)


def test_runs_of_older_releases_are_refused_with_the_reason(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents have one version, and nothing is overwritten."""
    with monkeypatch.context() as older:
        older.setattr("lightning_moe_ckpt.storage._json.VERSION", 2)
        save(begin(PosixBackend(place)), 10, KEEP)
    before = _bytes_below(place)
    with pytest.raises(Corrupt, match=r"another release wrote this run.*expected .*begin a new run under another URL"):
        RunStore.open(PosixBackend(place), resume="auto")
    with pytest.raises(NoUsableGeneration, match="no committed generation"):
        repair_log(PosixBackend(place), dry_run=False)
    assert _bytes_below(place) == before


def _bytes_below(place: Path) -> dict[Path, bytes]:
    """Every file but those that ask whether the place can be written to."""
    files = (each for each in place.rglob("*") if each.is_file() and "_probe" not in str(each))
    return {file: file.read_bytes() for file in files}


def test_a_generation_of_the_step_that_its_incarnation_began_from_is_still_known(place: Path) -> None:
    """Another start has begun from it since, and stored nothing."""
    save(begin(PosixBackend(place)), 10, KEEP)
    second = begin(PosixBackend(place))
    save(second, 10, KEEP)
    for _ in range(2):
        store = RunStore.open(PosixBackend(place), resume="must")
        newest = store.candidates()[0].generation
        assert newest == second.name(10)
        assert store.open_incarnation(newest) is not None


def test_starts_that_store_nothing_make_the_log_no_longer(place: Path) -> None:
    save(begin(PosixBackend(place)), 10, KEEP)
    for _ in range(5):
        begin(PosixBackend(place))
    assert [(cut.incarnation, cut.step) for cut in history(place).cuts] == [(1, None), (6, 10)]


# What is lost must not look like nothing.


@pytest.mark.parametrize("resume", ["auto", "must", "memory"])
def test_generations_without_a_log_are_not_the_beginning_of_a_run(place: Path, resume: Resume) -> None:
    store = begin(PosixBackend(place))
    for step in (10, 20):
        save(store, step, KEEP)
    shutil.rmtree(place / "_log")
    before = _bytes_below(place)
    with pytest.raises(
        NoUsableGeneration, match=r"2 committed generations.*no log.*repair.*resume='never'.*another URL"
    ):
        RunStore.open(PosixBackend(place), resume=resume)
    assert _bytes_below(place) == before


def test_generations_that_no_log_names_are_never_deleted(place: Path) -> None:
    """A run that begins beside them keeps off, and so does a garbage collector; what a log names as replaced goes."""
    lost = begin(PosixBackend(place))
    save(lost, 10, KEEP)
    shutil.rmtree(place / "_log")
    replaced = RunStore.open(PosixBackend(place), resume="never")
    replaced.candidates()
    replaced.open_incarnation(None)
    save(replaced, 11, KEEP)
    new = RunStore.open(PosixBackend(place), resume="never")
    new.candidates()
    new.open_incarnation(None)
    for step in (1, 2, 3, 4):
        save(new, step, Retention(last=1))
    found = collect_garbage(PosixBackend(place), Retention(last=1))
    assert {generation.generation: generation.reason for generation in found.stays}[
        lost.name(10)
    ] == "of a run that the log does not name"
    left = {generation.generation for generation in RunView.open(PosixBackend(place)).generations()}
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


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_killed_at_its_first_commit_is_told_from_one_without(
    place: Path, tmp_path: Path, when: Literal["before", "after"]
) -> None:
    """At any call: it goes on where that was, and if all generations are lost then, it does not begin anew."""
    outcomes, finished = list[int](), False
    while not finished:
        folder = place / str(len(outcomes))
        store = begin(PosixBackend(folder))
        dying = CrashingBackend(PosixBackend(folder), crash_at=len(outcomes), when=when)
        assert store._coordination is not None
        store._backend = store._coordination.log._backend = dying
        with suppress(Crashed):
            save(store, 10, KEEP)
            finished = True
        committed = bool(list(folder.glob("snap/*/*/_COMMITTED")))
        shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=True)
        again = RunStore.open(PosixBackend(tmp_path / "copy"), resume="auto")
        again.promote()
        outcomes.append(len(again.candidates()))
        assert again.unreadable == []
        shutil.rmtree(folder / "snap", ignore_errors=True)
        again = RunStore.open(PosixBackend(folder), resume="auto")
        assert again.candidates() == []
        assert again.unreadable or not committed
        shutil.rmtree(tmp_path / "copy")
    assert sorted(set(outcomes)) == [0, 1]


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


def pipe(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()
    (path / "theirs").write_bytes(b"theirs")


def broken_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [pipe, folder, broken_link, link_to_itself])
@pytest.mark.parametrize("name", ["_COMMITTED", "rank00000.done", "rank00000.000000000020.safetensors", "."])
def test_what_stands_in_a_files_place_costs_its_generation(
    place: Path, name: str, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """It is named once, never waited for and never removed; something older is used, and training goes on."""
    store = begin(PosixBackend(place))
    for step in (10, 20):
        save(store, step, KEEP)
    strange = place / store.name(20).prefix / name
    shutil.rmtree(strange) if strange.is_dir() else strange.unlink()
    if name != "." or make is not folder:  # an empty generation is none
        make(strange)
    again = RunStore.open(PosixBackend(place), resume="auto")
    usable = [commit for commit in again.candidates() if marker_reads(again, commit)]
    assert [commit.generation.step for commit in usable] == [10]
    assert again.open_incarnation(usable[0].generation) is not None
    for step in (12, 14, 16):
        save(again, step, Retention(last=1))
    assert steps(again) == [16]
    if os.path.lexists(strange):
        assert caplog.text.count(f"{strange}: is ") >= 1
        assert caplog.text.count("Until then what needs it counts as damaged") == 1


def marker_reads(store: RunStore, commit: Commit) -> bool:
    try:
        (entry,) = store.read_marker(commit, 0).segments
        store.read_range(entry, 0, memoryview(bytearray(entry.nbytes)))
    except Corrupt:
        return False
    return True


def test_a_log_is_made_again_from_manifests(place: Path) -> None:
    """First it is only shown. What a later incarnation left behind stays behind, and what is damaged is named."""
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
    assert (again.run_id, again.incarnation, steps(again)) == (first.run_id, 3, [10, 20, 25])
    for step in (30, 35):
        save(again, step, Retention(last=1))
    assert steps(begin(PosixBackend(place))) == [35]
    with pytest.raises(ConfigurationError, match="nothing to repair"):
        repair_log(late, dry_run=False)


def test_a_log_that_cannot_be_read_is_made_again_behind_what_is_there(place: Path, tmp_path: Path) -> None:
    """Of two incarnations of one number the one that began last counts; another run's and damaged ones are left out."""
    hung, successor = overtaken(place, tmp_path)
    save(successor, 20, KEEP, unix_time=100)
    late = publish_late(place, hung, 15, unix_time=200)
    backend = PosixBackend(place)
    for entry in backend.list("_log/"):
        backend.put(entry.key, b"spoilt")
    manifest = place / f"{successor.name(20).prefix}_COMMITTED"
    (place / "snap/000000000050/i000001-0123456789ab").mkdir(parents=True)
    (place / "snap/000000000050/i000001-0123456789ab/_COMMITTED").write_bytes(manifest.read_bytes())
    found = repair_log(backend, dry_run=False)
    assert {*found.left_out} == {GenerationId(step=50, incarnation=1, nonce="0123456789ab"), late}
    assert steps(begin(PosixBackend(place))) == [10, 20]


def test_a_repair_takes_no_late_commit_of_a_job_that_was_followed(place: Path) -> None:
    """Its successor has gone far before its first commit, and says in it from where it began."""
    hung = begin(PosixBackend(place))
    save(hung, 10, KEEP)
    successor = begin(PosixBackend(place))
    save(successor, 40, KEEP)
    late = publish_late(place, hung, 20)
    shutil.rmtree(place / "_log")
    found = repair_log(PosixBackend(place), dry_run=False)
    assert list(found.usable) == [successor.name(40), hung.name(10)]
    assert found.left_out == {late: "incarnation 2 began again from step 10"}
    assert steps(begin(PosixBackend(place))) == [10, 40]


def test_a_repair_follows_the_life_that_began_last_whatever_its_number(place: Path, tmp_path: Path) -> None:
    """The job that a backup overtook was the fourth, and the one that follows is the third again."""
    save(begin(PosixBackend(place)), 10, KEEP)
    save(begin(PosixBackend(place)), 20, KEEP)
    shutil.copytree(place, tmp_path / "backup")
    left = begin(PosixBackend(place))
    hung = begin(PosixBackend(place))
    put_back(tmp_path / "backup", place)
    successor = begin(PosixBackend(place))
    assert (left.incarnation, hung.incarnation, successor.incarnation) == (3, 4, 3)
    save(successor, 25, KEEP, unix_time=100)
    late = publish_late(place, hung, 30, unix_time=200)
    shutil.rmtree(place / "_log")
    found = repair_log(PosixBackend(place), dry_run=False)
    assert [each.step for each in found.usable] == [25, 20, 10]
    assert [*found.left_out] == [late]
    again = begin(PosixBackend(place))
    assert (again.incarnation, steps(again)) == (5, [10, 20, 25])


def test_a_clock_that_is_slow_makes_no_descendant_an_ancestor(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job goes on where its new node takes it to be a year earlier."""
    first = begin(PosixBackend(place))
    save(first, 10, KEEP)
    before = time.time_ns() - 10**9 * 86400 * 365
    monkeypatch.setattr("lightning_moe_ckpt.storage._commit.time.time_ns", lambda: before)
    second = begin(PosixBackend(place))
    monkeypatch.undo()
    save(second, 20, KEEP)
    shutil.rmtree(place / "_log")
    assert list(repair_log(PosixBackend(place), dry_run=True).usable) == [second.name(20), first.name(10)]


def test_a_repair_knows_what_was_kept_below_the_watermark(place: Path) -> None:
    """Lives of which only such generations are left are named by these alone."""
    keep = Retention(last=1, every_n_steps=10)
    for step in (10, 15, 20, 25):
        save(begin(PosixBackend(place)), step, keep)
    newest = begin(PosixBackend(place))
    save(newest, 26, keep)
    assert steps(newest) == [10, 20, 26]
    shutil.rmtree(place / "_log")
    assert [each.step for each in repair_log(PosixBackend(place), dry_run=False).usable] == [26, 20, 10]
    assert steps(begin(PosixBackend(place))) == [10, 20, 26]


def test_a_log_is_not_made_again_of_manifests_without_a_lineage(place: Path) -> None:
    """They do not say what their incarnation descends from."""
    save(begin(PosixBackend(place)), 10, KEEP, with_line=False)
    shutil.rmtree(place / "_log")
    with pytest.raises(NoUsableGeneration, match="no committed generation"):
        repair_log(PosixBackend(place), dry_run=True)


@pytest.mark.parametrize("part", ["_COMMITTED", "rank00000.done", "rank00000.000000000020.safetensors"])
def test_a_repair_makes_a_manifest_again_where_all_markers_are_good(place: Path, part: str) -> None:
    """It follows from them. What they vouch for must be there in its size, as for any commit."""
    store = begin(PosixBackend(place))
    for step in (10, 20):
        save(store, step, KEEP)
    shutil.rmtree(place / "_log")
    manifest = place / f"{store.name(20).prefix}_COMMITTED"
    good = manifest.read_bytes()
    for path in {manifest, manifest.with_name(part)}:
        path.write_bytes(path.read_bytes()[:-1])
    for dry_run in (True, False):
        found = repair_log(PosixBackend(place), dry_run=dry_run)
        assert (manifest.read_bytes() == good) == (part == "_COMMITTED" and not dry_run)
    if part == "_COMMITTED":
        assert (found.usable, found.mended) == ([store.name(20), store.name(10)], [store.name(20)])
        assert steps(begin(PosixBackend(place))) == [10, 20]
    else:
        assert (found.usable, found.mended) == ([store.name(10)], [])
        assert "do not match" in found.left_out[store.name(20)]


def test_a_job_may_finish_what_it_has_over_a_backup_of_its_own(place: Path, tmp_path: Path) -> None:
    """Nobody was started since: what it stored is the next of the same line, and the next start commits it.

    Who wants the older state stops the job before.
    """
    store = begin(PosixBackend(place))
    save(store, 10, KEEP)
    shutil.copytree(place, tmp_path / "backup")
    for step in (20, 30):
        save(store, step, Retention(last=1))
    put_back(tmp_path / "backup", place)
    with pytest.raises(Fenced, match="put back"):
        store.commit(write(store, 40), timeout=NOW)
    again = RunStore.open(PosixBackend(place), resume="auto")
    assert (again.promote(), steps(again)) == ([store.name(40)], [10, 40])


def test_a_job_that_was_followed_finishes_nothing(place: Path, tmp_path: Path) -> None:
    """Neither before its successor has stored something nor after; whichever of them has the larger number."""
    hung, successor = overtaken(place, tmp_path)
    write(hung, 15)
    assert RunStore.open(PosixBackend(place), resume="auto").promote() == []
    save(successor, 12, KEEP)
    again = RunStore.open(PosixBackend(place), resume="auto")
    assert (again.promote(), steps(again)) == ([], [10, 12])


def test_nothing_is_made_of_nothing(place: Path) -> None:
    with pytest.raises(NoUsableGeneration, match="holds no run"):
        repair_log(PosixBackend(place), dry_run=True)
