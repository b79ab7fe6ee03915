"""Generations that have a dense part and some experts, and reference the other experts: what was written says where it is from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta

from lightning_moe_ckpt.errors import Corrupt, KeyMissing
from lightning_moe_ckpt.storage import (
    Backend,
    Commit,
    GenerationId,
    RankMarker,
    RecordEntry,
    Retention,
    RunStore,
    SegmentEntry,
    carry_forward,
    carry_spares,
    digest_of,
    full_records,
    segment_key,
)
from stored._segments import read_record

DENSE = "dense"
EXPERTS = ("expert.0", "expert.1", "expert.2")
_NBYTES = 48

Sources = Mapping[str, GenerationId]
"""From which generation each operator is."""


def piece(operator: str, generation: GenerationId, rank: int) -> bytes:
    """What `rank` stores of an operator; different in every generation of every incarnation."""
    return f"{operator}@{generation.step}/{generation.incarnation}/{generation.nonce}/{rank};".encode().ljust(
        _NBYTES, b"."
    )


def part(
    run_id: str,
    generation: GenerationId,
    rank: int,
    *,
    world_size: int,
    experts: Collection[str],
    previous: RankMarker | None,
) -> tuple[RankMarker, bytes]:
    """The marker and the file of one rank.

    Args:
        run_id: of the run.
        generation: its name.
        rank: whose part.
        world_size: ranks.
        experts: those that it stores.
        previous: the rank's marker of the generation before, from which it references the others.
    """
    operators = (DENSE, *sorted(experts))
    pieces = [piece(operator, generation, rank) for operator in operators]
    records = [
        RecordEntry(
            name=f"full/{operator}", operator=operator, kind="full", fqn=operator, state_key="param", dtype="U8",
            global_shape=(world_size * _NBYTES,), global_start=rank * _NBYTES, numel=_NBYTES, offset=i * _NBYTES,
            nbytes=_NBYTES, digest=digest_of(pieces[i]),
        )
        for i, operator in enumerate(operators)
    ]  # fmt: skip
    data = b"".join(pieces)
    key = segment_key(generation, rank, generation.step)
    own = SegmentEntry(step=generation.step, key=key, nbytes=len(data), digest=digest_of(data), records=records)
    lacking = set(EXPERTS) - set(experts)
    marker = RankMarker(
        run_id=run_id, rank=rank, world_size=world_size, generation=generation, plan_hash="p", segments=(own,),
        referenced=() if previous is None else carry_forward(previous, lacking),
        spares=() if previous is None else carry_spares(previous, lacking, experts), unix_time=generation.step,
    )  # fmt: skip
    return marker, data


def read_back(store: RunStore, commit: Commit) -> Sources:
    """From which generation every operator of a generation is; every byte of every rank was read.

    Raises:
        Corrupt: something is not what was written.
        KeyMissing: something is gone.
    """
    found = [_read_rank(store, commit, rank) for rank in range(commit.world_size)]
    assert all(each == found[0] for each in found), "ranks have experts of different generations"
    assert found[0].keys() == {DENSE, *EXPERTS}, "an operator is nowhere"
    assert {each for each in found[0].values() if each != commit.generation} == set(commit.needs)
    return found[0]


def _read_rank(store: RunStore, commit: Commit, rank: int) -> dict[str, GenerationId]:
    sources: dict[str, GenerationId] = {}
    for file, record in full_records(store.read_marker(commit, rank)):
        out = bytearray(record.nbytes)
        read_record(store, file, record, memoryview(out))
        step, incarnation, life, _ = out.decode().partition("@")[2].partition(";")[0].split("/")
        generation = GenerationId(step=int(step), incarnation=int(incarnation), nonce=life)
        assert out == piece(record.operator, generation, rank), "verified, but not what was written"
        assert record.operator not in sources, "an operator comes from two files"
        sources[record.operator] = generation
    return sources


class PartialJob:
    """One incarnation of a job: starts from the newest generation that reads back, and saves parts of what it trains.

    Args:
        backend: where to.
        world_size: ranks, all in this process.
    """

    def __init__(self, backend: Backend, world_size: int = 2) -> None:
        self.store = RunStore.open(backend, resume="auto")
        self.world_size = world_size
        self.resumed: GenerationId | None = None
        incarnation = None
        while incarnation is None:
            self.store.promote()
            self.resumed = next((c.generation for c in self.store.candidates() if self.is_good(c)), None)
            incarnation = self.store.open_incarnation(self.resumed)
        self.incarnation = incarnation
        commits = {commit.generation: commit for commit in self.store.candidates()}
        self.previous = None if self.resumed is None else self._markers(commits[self.resumed])

    def is_good(self, commit: Commit) -> bool:
        """Whether every byte of it is there."""
        try:
            read_back(self.store, commit)
        except (Corrupt, KeyMissing):
            return False
        return True

    def write(self, step: int, *experts: str, ranks: int | None = None) -> list[RankMarker]:
        """Files and markers of the first `ranks` ranks, or all; without experts before, all of them."""
        generation = self.store.name(step)
        markers = []
        for rank in range(self.world_size if ranks is None else ranks):
            previous = None if self.previous is None else self.previous[rank]
            chosen = EXPERTS if previous is None else experts
            marker, data = part(
                self.store.run_id, generation, rank, world_size=self.world_size, experts=chosen, previous=previous
            )
            self.store.put_segment(generation, rank, step, memoryview(data))
            self.store.put_marker(marker)
            markers.append(marker)
        return markers

    def commit(self, markers: list[RankMarker]) -> Commit:
        """Make it visible, and refer to it from now on."""
        commit = self.store.commit(markers[0], timeout=timedelta())
        self.previous = markers
        return commit

    def save(self, step: int, *experts: str, keep: Retention | int = 2) -> Commit:
        """A generation with these experts, and what `keep` leaves of the others."""
        commit = self.commit(self.write(step, *experts))
        self.store.retain(Retention(last=keep) if isinstance(keep, int) else keep)
        return commit

    def restorable(self) -> dict[int, Sources]:
        """What can be restored, read back, by step."""
        return {commit.generation.step: read_back(self.store, commit) for commit in self.store.candidates()}

    def _markers(self, commit: Commit) -> list[RankMarker]:
        return [self.store.read_marker(commit, rank) for rank in range(self.world_size)]
