"""What nodes hold of a run whose processes have ended goes to storage whole or not at all, from one node or from several."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from door import DIRECTORY_VARIABLE
from launcher import exit_after

from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.errors import StorageRefused
from lightning_moe_ckpt.storage import GenerationId, PosixBackend, RankMarker, RunStore, RunView, _commit, _run_store
from lightning_moe_ckpt.tiers import SegmentRing, shared_name
from lightning_moe_ckpt.tiers._shm import MemoryKind
from recovery._world import Node, World
from recovery.conftest import MakeWorld

A, B = "a", "b"


class Left:
    """A run of two ranks that has ended with step 1 in storage, and what nodes hold of it."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.world, self._monkeypatch, self._capsys = world, monkeypatch, capsys
        world.tiers = {node: Node(world.store.memory_tag, node) for node in world.nodes}
        self.commit(1)

    def commit(self, step: int) -> None:
        """Storage gets what ranks had at a step."""
        for rank in range(self.world.world_size):
            marker, (data,) = self.world.part(step, rank, window=1)
            self.world.store.put_segment(marker.generation, rank, step, memoryview(data))
            self.world.store.put_marker(marker)
        self.world.store.commit(self.world.part(step, 0, window=1)[0], timeout=timedelta())

    def holds(self, node: str, rank: int, *steps: int, copies: bool = False) -> Path:
        """A node holds these steps of a rank: in the rank's ring on its own node, else as copies."""
        place = next(each for each in self.world.nodes if each.name == node)
        kind: MemoryKind = "ring" if self.world.nodes[rank] == place and not copies else "replica"
        parts = [self.world.part(step, rank, window=1) for step in steps]
        name = shared_name(self.world.store.memory_tag, rank, kind)
        ring = SegmentRing.create(name, len(parts[0][1][0]), len(parts), place)
        for marker, (data,) in parts:
            ring.begin_window(marker.generation)
            slot = ring.acquire(marker.generation, marker.generation.step)
            slot.view[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            ring.seal(slot)
            ring.finish_window(marker.generation)
            ring.publish(marker.generation, marker)
        ring.close(unlink=False)
        return place / name

    def flush(self, node: str, *options: str, wait: str = "0.1s") -> tuple[int, str]:
        """The command on a node: its exit status, and what it says."""
        place = next(each for each in self.world.nodes if each.name == node)
        self._monkeypatch.setenv(DIRECTORY_VARIABLE, str(place))
        before = sorted((path.name, path.read_bytes()) for path in place.iterdir())
        status = main(["flush", self.world.backend.url, "--wait", wait, *options])
        assert before == sorted((path.name, path.read_bytes()) for path in place.iterdir()), "memory stays as it was"
        said = self._capsys.readouterr()
        return status, said.out + said.err

    @property
    def newest(self) -> GenerationId:
        """What a start would resume from; its files have the bytes that ranks had."""
        view = RunView.open(self.world.backend)
        found = next(each for each in view.generations() if each.usable)
        assert found.commit is not None
        for rank in range(self.world.world_size):
            marker, (data,) = self.world.part(found.generation.step, rank, window=1)
            assert view.read_marker(found.commit, rank) == marker
            assert self.world.file_in_storage(marker.segments[0]).read_bytes() == data
        return found.generation


MakeLeft = Callable[..., Left]


@pytest.fixture
def make_left(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> MakeLeft:
    """Makes what a run has left, from the names of its ranks' nodes."""
    return lambda *nodes: Left(make_world(*nodes), monkeypatch, capsys)


def test_every_node_brings_its_ranks_and_the_last_one_commits(make_left: MakeLeft) -> None:
    """Until then a start finds what storage had; the first node is told where the rest is, and a repetition has nothing to do."""
    left = make_left(A, B)
    left.holds(A, 0, 2, 3)
    left.holds(B, 1, 2, 3)
    status, said = left.flush(A)
    assert (status, left.newest.step) == (1, 1)
    assert "rank 1: no marker yet" in said
    assert "Flush on the nodes of those ranks too." in said
    assert left.flush(B)[0] == 0
    assert left.newest.step == 3
    for node in (A, B):
        status, said = left.flush(node)
        assert status == 0
        assert "nothing to do: storage has step 3 (incarnation 1)" in said


def test_two_nodes_at_once(make_left: MakeLeft) -> None:
    """Each waits for the other, and both commit the same; a half that only one node has does not keep them."""
    left = make_left(A, B)
    left.holds(A, 0, 2, 3, 4)
    left.holds(B, 1, 2, 3)

    def on(node: str) -> int:
        pid = os.fork()
        if pid == 0:
            exit_after(lambda: os._exit(left.flush(node, wait="2s")[0]))
        return pid

    statuses = [os.waitpid(pid, 0)[1] for pid in [on(node) for node in (A, B)]]
    assert [os.waitstatus_to_exitcode(status) for status in statuses] == [1, 0], "step 4 is nowhere of the other rank"
    assert left.newest.step == 3


def test_copies_complete_the_part_of_a_node_that_is_gone(make_left: MakeLeft) -> None:
    """The newest of which this node has all; and what is newer there of one rank only stays uncommitted."""
    left = make_left(A, B)
    left.holds(A, 0, 2, 3)
    left.holds(A, 1, 2)
    status, said = left.flush(A)
    assert (status, left.newest.step) == (1, 2), said


def test_a_rank_that_had_not_finished_is_not_waited_for(make_left: MakeLeft) -> None:
    """Its memory is here, and has the step before."""
    left = make_left(A, A)
    left.holds(A, 0, 2, 3)
    left.holds(A, 1, 2)
    began = time.monotonic()
    status, said = left.flush(A, wait="60s")
    assert time.monotonic() - began < 30
    assert (status, left.newest.step) == (0, 2)
    assert "rank 1, whose memory is here, had not finished it" in said


@pytest.mark.parametrize("copied", [True, False])
def test_a_torn_ring_is_not_stored(make_left: MakeLeft, copied: bool) -> None:
    """A copy takes its place, or else the step before."""
    left = make_left(A, A)
    path = left.holds(A, 0, 2, 3)
    left.holds(A, 1, 2, 3)
    if copied:
        left.holds(A, 0, 3, copies=True)
    _, (data,) = left.world.part(3, 0, window=1)
    torn = bytearray(path.read_bytes())
    torn[torn.index(data) + 5000] ^= 1
    path.write_bytes(torn)
    status, said = left.flush(A)
    assert (status, left.newest.step) == ((0, 3) if copied else (1, 2))
    assert ("has other bytes of step 3 than its marker says" in said) == (not copied)


def test_a_run_that_lives_is_left_alone(make_left: MakeLeft) -> None:
    """A process holds a ring: what to do is said, and nothing is written."""
    left = make_left(A, A)
    path = left.holds(A, 0, 2)
    left.holds(A, 1, 2)
    pid = os.fork()
    if pid == 0:
        ring = SegmentRing.adopt(path)
        assert ring is not None
        path.with_name("held").touch()
        signal.pause()
    while not path.with_name("held").exists():
        time.sleep(0.01)
    status, said = left.flush(A)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert (status, left.newest.step) == (2, 1)
    assert f"process {pid} " in said
    assert "End it by SIGTERM" in said
    assert left.flush(A)[0] == 0
    assert left.newest.step == 2


def test_what_the_log_has_left_behind_is_not_stored(make_left: MakeLeft) -> None:
    """A later start went on from step 1 on another node, which makes step 2 dead; one that went on from step 2 does not."""
    left = make_left(A, A)
    left.holds(A, 0, 2)
    left.holds(A, 1, 2)
    later = RunStore.open(left.world.backend, resume="must")
    later.candidates()
    later.open_incarnation(left.world.store.name(2), volatile=[left.world.store.name(2)])
    assert left.flush(A)[0] == 0
    assert left.newest == left.world.store.name(2)
    left.holds(A, 0, 3)
    left.holds(A, 1, 3)
    status, said = left.flush(A)
    assert (status, left.newest.step) == (0, 2)
    assert "memory of this node nothing newer" in said


def test_a_start_that_comes_meanwhile_wins(make_left: MakeLeft, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens its incarnation when all parts are there, and what is flushed stays uncommitted."""
    left = make_left(A, A)
    left.holds(A, 0, 2)
    left.holds(A, 1, 2)
    put_marker = RunStore.put_marker

    def start(store: RunStore, marker: RankMarker) -> None:
        put_marker(store, marker)
        if marker.rank == 1:
            later = RunStore.open(left.world.backend, resume="must")
            later.open_incarnation(later.candidates()[0].generation)

    monkeypatch.setattr(RunStore, "put_marker", start)
    status, said = left.flush(A)
    assert (status, left.newest.step) == (2, 1)
    assert "a later start of this job" in said


def test_a_flush_that_is_killed_behind_a_marker_leaves_no_receipt_of_the_one_before(
    make_left: MakeLeft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks had stored the same step, and a file was lost: what is written again is what the next start reads."""
    monkeypatch.setattr(_commit, "RECEIPTS_FROM", 1)
    left = make_left(A, A)
    for rank in range(2):
        left.holds(A, rank, 2)
        marker, (data,) = left.world.part(2, rank, window=1)
        left.world.store.put_segment(marker.generation, rank, 2, memoryview(data))
        # A size more or less is noticed anyway.
        left.world.store.put_marker(replace(marker, unix_time=marker.unix_time + rank))
    left.world.backend.delete(marker.segments[0].key)

    def killed(*_: object) -> None:
        raise StorageRefused("killed")

    with monkeypatch.context() as broken:
        broken.setattr(_run_store, "put_receipt", killed)
        left.flush(A)
    store = RunStore.open(left.world.backend, resume="must")
    assert [each.step for each in store.promote()] == [2]
    assert left.newest.step == 2


def test_a_start_that_has_looked_already_looks_again(make_left: MakeLeft) -> None:
    """Its place in the log is taken by the flush: the second look finds what was stored."""
    left = make_left(A, A)
    left.holds(A, 0, 2)
    left.holds(A, 1, 2)
    later = RunStore.open(left.world.backend, resume="must")
    assert later.candidates()[0].generation.step == 1
    assert left.flush(A)[0] == 0
    assert later.open_incarnation(later.candidates()[0].generation) == 2
    later = RunStore.open(left.world.backend, resume="must")
    assert later.candidates()[0].generation.step == 2


def test_a_store_that_is_full_or_gone_is_said_and_memory_stays(
    make_left: MakeLeft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line; when there is room again, it is done."""
    left = make_left(A, A)
    left.holds(A, 0, 2)
    left.holds(A, 1, 2)

    def refuse(*_: object) -> None:
        raise StorageRefused("put: No space left on device.")

    with monkeypatch.context() as patched:
        patched.setattr(PosixBackend, "put", refuse)
        status, said = left.flush(A)
    assert (status, left.newest.step) == (2, 1)
    assert f"moe-ckpt {left.world.backend.url}: put: No space left on device.\n" in said
    assert left.flush(A)[0] == 0
    assert left.newest.step == 2


def test_another_run_under_the_url_is_not_touched(make_left: MakeLeft) -> None:
    """Memory of the run before has another name, whatever it holds."""
    left = make_left(A, A)
    left.holds(A, 0, 2)
    left.holds(A, 1, 2)
    RunStore.open(left.world.backend, resume="never")
    status, said = left.flush(A)
    assert status == 0
    assert "nothing to do: storage has nothing, memory of this node nothing newer" in said
