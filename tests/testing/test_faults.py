"""Faults as values, and their parts one by one; whole campaigns are in `tests/campaign`."""

from __future__ import annotations

import itertools
import json
import os
import random
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from door import read_lines
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from tiers._segments import LAYOUT, RUN, check, generation, keep

from lightning_moe_ckpt import testing
from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, StorageError
from lightning_moe_ckpt.storage import (
    Backend,
    GenerationId,
    WrappedBackend,
    open_backend,
    segment_key,
    wrapping_backends,
)
from lightning_moe_ckpt.testing import Fault, FaultInjector, RandomFaults, fail_at, summarize_faults
from lightning_moe_ckpt.testing.__main__ import main
from lightning_moe_ckpt.testing._fault import FaultPhase, Schedule
from lightning_moe_ckpt.testing._fault_media import LastingFault, StorageFaults, TakenMemory, flip_memory_bit
from lightning_moe_ckpt.testing._fault_record import FaultRecord, fired, record_folder, uptime
from lightning_moe_ckpt.tiers import HostTier, SegmentRing, shared_name

# -- arguments

BAD: list[tuple[dict[str, Any], str]] = [
    ({"kind": "sigkil"}, r"`Fault\(kind='sigkil'\)` must be one of sigkill, sigstop, "),
    ({"phase": "backward"}, r"`Fault\(phase='backward'\)` must be one of batch_start, "),
    ({"rank": -1}, r"`Fault\(rank=-1\)` must be a rank from 0 on, or 'all'"),
    ({"rank": "each"}, "a rank from 0 on"),
    ({"step": -1}, "a step from 0 on"),
    ({"settle": -1.0}, "seconds from 0 on"),
    ({"kind": "sigstop", "seconds": 0.0}, "above 0"),
    ({"kind": "full_disk", "steps": 0}, "above 0"),
    ({"kind": "slow_storage", "latency": -1.0}, "seconds from 0 on"),
    ({"kind": "slow_storage", "bandwidth": 0.0}, "bytes per second"),
    ({"kind": "slow_storage"}, "slows nothing down"),
    ({"kind": "storage_errors", "probability": 1.5}, r"`Fault\(probability=1.5\)` must be from 0 to 1"),
    ({"kind": "storage_errors"}, "needs `probability`"),
    ({"kind": "full_shared_memory"}, "needs `nbytes`"),
    ({"kind": "full_shared_memory", "nbytes": 0}, "bytes above 0"),
    ({"kind": "bit_flip", "at_rest": "tape"}, "one of storage, ring, replica"),
    ({"kind": "sigkill", "seconds": 1.0}, "sigkill has no seconds. It takes none of them."),
    ({"kind": "full_disk", "probability": 0.5}, "full_disk has no probability. It takes seconds, steps."),
    ({"phase": "commit", "rank": 1}, "only rank 0 gets to 'commit'"),
    ({"phase": "persist", "settle": 1.0}, "would wait for itself"),
    ({"kind": "flip_gradient", "phase": "persist"}, "flip_gradient strikes in training, not in 'persist'"),
    ({"kind": "flip_moment", "bit": 64}, "a bit from 0 to 63, or None"),
    ({"kind": "flip_activation", "steps": 2}, "flip_activation has no steps. It takes bit, fqn, skip."),
    ({"kind": "flip_gradient", "skip": -1}, "a number from 0 on"),
    ({"kind": "wrong_products", "fqn": "head"}, "wrong_products has no fqn. It takes bit, seconds, steps."),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_a_fault_that_cannot_be_says_why(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Fault(**arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mtbf": 0.0}, r"`RandomFaults\(mtbf=0.0\)` must be above 0"),
        ({"mtbf": 1.0, "unit": "hours"}, "'seconds' or 'steps'"),
        ({"mtbf": 1.0, "kinds": []}, "at least one fault"),
        ({"mtbf": 1.0, "phases": ["nowhere"]}, "must be of batch_start"),
        ({"mtbf": 1.0, "most": 0}, "1 or more"),
    ],
)
def test_a_campaign_that_cannot_be_says_why(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        RandomFaults(**arguments)


def _trainer(tmp_path: Path, injector: FaultInjector) -> Trainer:
    return Trainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        callbacks=[injector],
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.filterwarnings("ignore:.*litlogger.*")
def test_a_rank_outside_the_job_is_an_error_when_the_fit_begins(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, FaultInjector([fail_at(1, 5)]))
    with pytest.raises(
        ConfigurationError, match=r"`Fault\(rank=1, step=5\)` strikes no rank: the job has ranks 0 to 0"
    ):
        trainer.fit(BoringModel())


def test_what_is_no_fault_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="must hold `Fault`s"):
        FaultInjector([{"kind": "sigkill"}])  # type: ignore[list-item]


def test_a_fault_that_never_strikes_is_named_and_nothing_is_left_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typing error in a step number is seen; module, trainer and package are as before the fit."""
    from lightning_moe_ckpt.session import _capture

    monkeypatch.setenv("MOE_CKPT_FAULTS", str(tmp_path / "from the environment"))
    before = _capture.CaptureSession.capture
    model, injector = BoringModel(), FaultInjector([fail_at(0, 99)])
    trainer = _trainer(tmp_path, injector)
    trainer.fit(model)
    assert "`Fault(step=99)` never struck" in caplog.text
    assert trainer.callbacks == [injector]  # type: ignore[attr-defined]
    assert "training_step" not in vars(model)
    assert _capture.CaptureSession.capture is before
    events = [line["event"] for line in read_lines(tmp_path / "from the environment" / "rank00000.jsonl")]
    assert events == ["start", "join", "train", "step", "end"]


# -- at random


def test_the_same_seed_draws_the_same_faults() -> None:
    """However often and however far, and other seeds others; times have the mean that was asked for."""
    campaign = RandomFaults(mtbf=20.0, seed=5)
    first, again = (list(itertools.islice(campaign.draw(4), 2000)) for _ in range(2))
    assert first == again
    assert first != list(itertools.islice(RandomFaults(mtbf=20.0, seed=6).draw(4), 2000))
    assert first[-1].seconds is not None
    assert 18.0 < first[-1].seconds / 2000 < 22.0
    assert {each.fault.rank for each in first} == {0, 1, 2, 3}


def test_a_campaign_in_steps_names_places_in_order() -> None:
    phases: list[FaultPhase] = ["forward", "commit"]
    drawn = list(RandomFaults(mtbf=5.0, unit="steps", phases=phases, most=50).draw(3))
    assert len(drawn) == 50
    assert [each.fault.step for each in drawn] == sorted(each.fault.step for each in drawn)
    assert {each.fault.phase for each in drawn} == set(phases)
    assert all(each.fault.rank == 0 for each in drawn if each.fault.phase == "commit")


def test_a_schedule_gives_each_rank_its_faults_once() -> None:
    """At the first place at or after the step; those that struck before are not among them."""
    script = [fail_at(0, 3), fail_at(1, 3), fail_at("all", 5, "forward"), fail_at(1, 4, kind="node_loss")]
    fresh = Schedule(script, None, rank=0, world_size=2, fired=())
    assert fresh.take("batch_start", 2) == []
    assert [each.fault for each in fresh.take("batch_start", 4)] == [script[0], script[3]]
    (last,) = fresh.take("forward", 7)
    assert fresh.take("batch_start", 9) == fresh.waiting == []
    assert Schedule(script, None, rank=1, world_size=2, fired={last.name}).take("forward", 9) == []


# -- the record


def test_a_record_outlives_a_torn_line(tmp_path: Path) -> None:
    """A machine that dies in the middle of a write costs that line only."""
    FaultRecord(tmp_path, 0).write("fault", name="a", kind="sigkill")
    with (tmp_path / "rank00000.jsonl").open("a") as file:
        file.write('{"event": "fault", "na')
    FaultRecord(tmp_path, 0).write("fault", sync=True, name="b", kind="sigkill")
    FaultRecord(tmp_path, 3).write("fault", name="c", kind="sigkill")
    assert fired(tmp_path) == {"a", "b", "c"}


def test_the_folder_is_given_or_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_CKPT_FAULTS", raising=False)
    assert record_folder(None, tmp_path) == tmp_path / "moe-ckpt-faults"
    monkeypatch.setenv("MOE_CKPT_FAULTS", str(tmp_path / "b"))
    assert record_folder(None, tmp_path) == tmp_path / "b"
    assert record_folder(tmp_path / "c", tmp_path) == tmp_path / "c"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be written"):
        FaultRecord(tmp_path / "file" / "below", 0)


def test_training_time_leaves_out_what_is_between_attempts() -> None:
    lines: list[dict[str, Any]] = [
        {"event": "start", "time": 0.0},
        {"event": "train", "time": 5.0},
        {"event": "step", "time": 7.0},
        {"event": "start", "time": 100.0},
        {"event": "train", "time": 110.0},
        {"event": "step", "time": 111.0},
        {"event": "end", "time": 111.5},
    ]
    assert uptime(lines) == pytest.approx(3.5)


CAMPAIGN: list[tuple[str, float, dict[str, Any]]] = [
    ("start", 0.0, {}),
    ("train", 10.0, {"step": 0}),
    ("step", 11.0, {"step": 1}),
    ("step", 12.0, {"step": 2}),
    ("step", 13.0, {"step": 3}),
    ("fault", 13.5, {"name": "a", "kind": "sigkill"}),
    ("start", 20.0, {}),
    ("train", 21.0, {"step": 1}),
    ("step", 23.0, {"step": 2}),
    ("fault", 23.1, {"name": "b", "kind": "sigstop"}),
    ("step", 24.0, {"step": 3}),
    ("step", 25.0, {"step": 4}),
    ("end", 25.0, {}),
]


def _write_campaign(folder: Path) -> None:
    folder.mkdir()
    lines = [json.dumps({"event": event, "time": time, "rank": 0, **more}) for event, time, more in CAMPAIGN]
    (folder / "rank00000.jsonl").write_text("\n".join(lines) + "\n")


def test_a_summary_counts_each_step_once(tmp_path: Path) -> None:
    """Step 1 of the first attempt and 2 to 4 of the second were kept: five of 25 seconds."""
    _write_campaign(tmp_path / "record")
    summary = summarize_faults(tmp_path / "record")
    assert (summary.lives, summary.finished, summary.steps, summary.steps_lost) == (2, True, 4, 2)
    assert (summary.wall_seconds, summary.productive_seconds) == (25.0, 5.0)
    assert summary.ettr == pytest.approx(0.2)
    kills, stops = summary.kinds
    assert (kills.kind, kills.injected, kills.deaths, kills.survived, kills.steps_lost) == ("sigkill", 1, 1, 1, 2)
    assert kills.seconds_lost == pytest.approx(10.0)
    assert (stops.kind, stops.injected, stops.deaths) == ("sigstop", 1, 0)


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write_campaign(tmp_path / "record")
    assert main([str(tmp_path / "record")]) == 0
    said = capsys.readouterr().out
    assert "sigkill" in said
    assert "ETTR 0.200" in said.replace("\n", " ")
    assert main([str(tmp_path / "record"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps_lost"] == 2
    assert main([str(tmp_path / "nothing")]) == 2
    assert "holds no record of faults" in capsys.readouterr().err


# -- storage


@pytest.fixture
def active() -> list[LastingFault]:
    return []


@pytest.fixture
def places() -> list[tuple[FaultPhase, int]]:
    return []


@pytest.fixture
def backend(tmp_path: Path, active: list[LastingFault], places: list[tuple[FaultPhase, int]]) -> Iterator[Backend]:
    """A real folder, opened as training opens it, with the faults that the test puts into `active`."""
    faults = StorageFaults(lambda: active, lambda *place: places.append(place))
    with wrapping_backends(lambda inner: WrappedBackend(inner, faults.around)):
        backend = open_backend(str(tmp_path / "store"), patience=timedelta(seconds=1))
    yield backend
    backend.close()


def _lasting(**arguments: Any) -> LastingFault:
    return LastingFault(name="test", fault=Fault(**arguments), step=0, since=time.time())


def test_slow_storage_takes_its_time(backend: Backend, active: list[LastingFault]) -> None:
    """Each call waits for the latency, and for its bytes at the bandwidth."""
    active.append(_lasting(kind="slow_storage", latency=0.02, bandwidth=1e6))
    calls: list[tuple[Callable[[], object], float]] = [
        (lambda: backend.put("a", bytes(50_000)), 0.07),
        (lambda: backend.get("a"), 0.07),
        (lambda: backend.get_into("a", memoryview(bytearray(50_000))), 0.07),
        (lambda: backend.list(""), 0.02),
    ]
    for call, least in calls:
        began = time.monotonic()
        call()
        assert time.monotonic() - began >= least
    assert active[0].calls == 4


def test_storage_errors_come_by_probability_and_are_retried(
    backend: Backend, active: list[LastingFault], caplog: pytest.LogCaptureFixture
) -> None:
    """The first of a hundred with one in two fails fewer than eighty times; certain failure reaches the caller."""
    lasting = _lasting(kind="storage_errors", probability=0.5)
    active.append(lasting)
    backend.put("a", b"x")
    assert backend.get("a") == b"x"
    drawn = [lasting.draws.random() < 0.5 for _ in range(100)]
    assert 20 < sum(drawn) < 80
    active[:] = [_lasting(kind="storage_errors", probability=1.0)]
    with pytest.raises(StorageError, match=r"get a: input/output error \(injected\)"):
        backend.get("a")
    assert active[0].calls > 2, "as often as it is tried"
    assert "Trying again" in caplog.text


def test_a_full_disk_takes_nothing_and_gives_what_it_has(backend: Backend, active: list[LastingFault]) -> None:
    """Writes fail with the error of the system; reads, lists and deletes work, and writes do when there is room."""
    backend.put("a", b"x")
    active.append(_lasting(kind="full_disk"))
    with pytest.raises(StorageError, match=r"put b: No space left on device") as caught:
        backend.put("b", b"y")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == 28
    assert backend.get("a") == b"x"
    backend.delete("a")
    active.clear()
    backend.put("b", b"y")
    assert [entry.key for entry in backend.list("")] == ["b"]


def test_calls_of_storage_are_phases(backend: Backend, places: list[tuple[FaultPhase, int]]) -> None:
    """With the step of their generation; reads and log entries are none."""
    generation = GenerationId(step=7, incarnation=1, nonce="0123456789ab")
    key = segment_key(generation, 0, 7)
    backend.put(key, b"")
    backend.put(f"{generation.prefix}rank00000.done", b"")
    backend.create(f"{generation.prefix}_COMMITTED", b"")
    backend.get(key)
    backend.create("_log/00000000000000000000.json", b"")
    backend.delete(key)
    assert places == [("persist", 7), ("marker", 7), ("commit", 7), ("reclaim", 7)]


def test_a_lasting_fault_ends_by_steps_or_by_time() -> None:
    assert [_lasting(kind="full_disk", steps=3).over(step) for step in (0, 2, 3)] == [False, False, True]
    past = LastingFault(name="", fault=Fault(kind="full_disk", seconds=5.0), step=0, since=time.time() - 6)
    assert past.over(0)
    assert not _lasting(kind="full_disk").over(10**9)
    assert past.outlasts_process
    assert not _lasting(kind="full_disk", steps=3).outlasts_process


# -- media


def test_one_bit_of_the_newest_copy_in_memory_is_flipped(tmp_path: Path) -> None:
    """Found by its digest; the rank's own ring stays its own: nobody else can take it over."""
    ring = SegmentRing.create(shared_name(RUN, 0), LAYOUT.nbytes, 9, tmp_path)
    for step in (3, 6):
        keep(ring, generation(step), (step - 1, step))
    before = ring.memory.clone()  # reading the file here would take the lock away
    said = flip_memory_bit(tmp_path, RUN, "ring", 0, random.Random(0))
    assert f"in {ring.path}, in step 6 (incarnation 1)" in said
    changed = (before ^ ring.memory)[before != ring.memory]
    assert [int(byte).bit_count() for byte in changed] == [1]
    tier = HostTier(RUN, tmp_path)
    newest, older = tier.holdings()
    check(tier, older)
    with pytest.raises((AssertionError, Corrupt)):
        check(tier, newest)
    tier.close()
    assert _in_another_process(lambda: SegmentRing.adopt(ring.path) is None)
    for kind, run_id in (("replica", RUN), ("ring", "another")):
        assert "holds a whole generation" in flip_memory_bit(tmp_path, run_id, kind, 0, random.Random(0))  # type: ignore[arg-type]
    ring.close()


def _in_another_process(holds: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if holds() else 1)
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:.*litlogger.*")
def test_a_rack_that_nobody_named_is_an_error_when_the_fit_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is one of the faults that may come at random."""
    monkeypatch.delenv("MOE_CKPT_RACK", raising=False)
    rack = Fault(kind="rack_loss")
    for injector in (FaultInjector([rack]), FaultInjector(random=RandomFaults(mtbf=1.0, kinds=[Fault(), rack]))):
        with pytest.raises(ConfigurationError, match="Set MOE_CKPT_RACK"):
            _trainer(tmp_path, injector).fit(BoringModel())


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB, where this user may mount one."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def _free(path: Path) -> int:
    stats = os.statvfs(path)
    return stats.f_bavail * stats.f_frsize


@pytest.mark.parametrize("most", [2**18, 2**30])
def test_shared_memory_is_full_until_it_is_given_back(small_tmpfs: Path, most: int) -> None:
    """Up to the limit that was given, without a name that could stay behind."""
    room = _free(small_tmpfs)
    memory = TakenMemory(small_tmpfs, most)
    assert memory.nbytes == min(most, room)
    assert _free(small_tmpfs) == room - memory.nbytes
    assert list(small_tmpfs.iterdir()) == []
    memory.release()
    assert _free(small_tmpfs) == room


def test_without_pytest_faults_can_still_be_injected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contracts are tests and stay away; a training job needs none."""
    assert "BackendContract" in runpy.run_path(testing.__file__)
    monkeypatch.setitem(sys.modules, "pytest", None)
    names = runpy.run_path(testing.__file__)
    assert "BackendContract" not in names
    assert names["FaultInjector"] is FaultInjector
