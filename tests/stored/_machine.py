"""A job of two ranks on two nodes over the real storage code and the real rings, and what must survive of it.

Ranks are objects in this process. A process that dies lets go of its rings without removing their names; a node that is
lost takes the directory that is its shared memory with it. What must survive is kept here by rules of its own.

Memory takes whole generations. What goes to storage has some of the experts, others by turns, and references the rest.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from door import Inventory, Item, Stock
from fsspec.implementations.memory import MemoryFileSystem

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.recovery import Version
from lightning_moe_ckpt.storage import (
    Backend,
    Commit,
    GenerationId,
    RankMarker,
    Retention,
    RunStore,
    SegmentEntry,
    collect_garbage,
    digest_of,
    segment_key,
)
from lightning_moe_ckpt.storage._fsspec import FsspecBackend
from lightning_moe_ckpt.tiers import HostTier, SegmentRing, shared_name
from stored._crashes import Crashed, CrashingBackend
from stored._partial import EXPERTS, Sources, part, read_back

RANKS = (0, 1)
SLOTS = 4
NBYTES = 4096
Loss = Literal["processes", "node 0", "node 1", "cluster"]


def content(generation: GenerationId, rank: int) -> bytes:
    """What `rank` captures; different in every generation of every incarnation."""
    return f"{generation.step}/{generation.incarnation}/{rank};".encode() * 5


def marker_of(run_id: str, generation: GenerationId, rank: int) -> RankMarker:
    data = content(generation, rank)
    entry = SegmentEntry(
        step=generation.step,
        key=segment_key(generation, rank, generation.step),
        nbytes=len(data),
        digest=digest_of(data),
    )
    return RankMarker(
        run_id=run_id, rank=rank, world_size=len(RANKS), generation=generation, plan_hash="p", segments=(entry,),
        unix_time=generation.step,
    )  # fmt: skip


class Memory:
    """One ring, and what must be in it."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / name
        self.needed: set[GenerationId] = set()
        """Whole here, and nothing newer is whole everywhere in this tier."""
        self.ring = SegmentRing.create(name, NBYTES, SLOTS, directory)

    def write(self, marker: RankMarker, *, whole: bool) -> bool:
        """Take a generation, or lose it on the way; whether it is whole."""
        generation = marker.generation
        if not self.ring.free_slots:
            return False
        self.ring.begin_window(generation)
        slot = self.ring.acquire(generation, generation.step)
        data = content(generation, marker.rank)
        slot.view[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if not whole:
            self.ring.abort_window(generation)
            return False
        self.ring.seal(slot)
        self.ring.finish_window(generation)
        self.ring.publish(generation, marker)
        self.needed.add(generation)
        return True

    def complete_everywhere(self, generation: GenerationId) -> None:
        self.ring.complete_everywhere(generation)
        self.needed = {each for each in self.needed if each >= generation}

    def die(self) -> None:
        """The process that holds it ends, and nothing is cleaned up."""
        self.ring.close(unlink=False)

    def adopt(self, resumed: GenerationId | None, directory: Path) -> None:
        """A new process goes on with it, and with what it resumes from only."""
        ring = SegmentRing.adopt(self._path) if self._path.exists() else None
        if ring is None:
            self.needed = set()
            self.ring = SegmentRing.create(self._path.name, NBYTES, SLOTS, directory)
            return
        self.ring = ring
        for generation in list(ring.complete):
            if generation != resumed:
                ring.discard(generation)
        self.needed = {each for each in self.needed if each == resumed}


class Job:
    """Starts, captures, replicates, commits, dies and starts again; every restart is checked."""

    def __init__(self) -> None:
        MemoryFileSystem.store.clear()  # listings take time for all that was ever stored
        MemoryFileSystem.pseudo_dirs[:] = [""]
        self.backend: Backend = FsspecBackend(f"memory://{uuid.uuid4().hex}/run")
        self.root = Path(tempfile.mkdtemp(prefix="moe-ckpt-histories-", dir="/dev/shm"))
        self.nodes = [self.root / f"node{rank}" for rank in RANKS]
        for node in self.nodes:
            node.mkdir()
        self.store = RunStore.open(self.backend, resume="auto")
        self.store.candidates()
        self.store.open_incarnation(None)
        run_id = self.store.run_id
        self.own = [Memory(self.nodes[rank], shared_name(run_id, rank)) for rank in RANKS]
        # The copy of a rank is on the other node.
        self.copies = [Memory(self.nodes[1 - rank], shared_name(run_id, rank, "replica")) for rank in RANKS]
        self.zombies: list[RunStore] = []
        self.committed: set[GenerationId] = set()
        """Committed, not given up, and not left behind by a later incarnation."""
        self.sources: dict[GenerationId, Sources] = {}
        self.spares: dict[GenerationId, Sources] = {}
        """Of every generation, from which other one the second copy of an expert is, if there is one."""
        """From which generation each operator of a stored one is."""
        self.held: set[GenerationId] = set()
        """Committed ones that are stored: to be restored, or for what others need of them."""
        self.previous: GenerationId | None = None
        """What the next save refers to."""
        self.step = 0
        self.restarts = 0

    @property
    def incarnation(self) -> int:
        assert self.store.incarnation is not None
        return self.store.incarnation

    # -- what an incarnation does

    def capture(self, whole: Sequence[bool]) -> None:
        """The next generation, sealed on some ranks or all."""
        self.step += 1
        generation = self.store.name(self.step)
        for rank in RANKS:
            self.own[rank].write(self._marker(generation, rank), whole=whole[rank])

    def tell(self, tier: Sequence[Memory]) -> None:
        """Ranks learn which generation all of them have in a tier."""
        everywhere = set.intersection(*(memory.needed for memory in tier))
        if everywhere:
            for memory in tier:
                memory.complete_everywhere(max(everywhere))

    def replicate(self, whole: Sequence[bool]) -> None:
        """Every rank's part of the newest generation goes to the other node, or not all of it."""
        generation = self._newest_sealed()
        if generation is None or any(generation <= each for memory in self.copies for each in memory.needed):
            return
        for rank in RANKS:
            self.copies[rank].write(self._marker(generation, rank), whole=whole[rank])

    def commit(self, retention: Retention, crash_at: int | None, when: Literal["before", "after"]) -> None:
        """The newest sealed generation becomes durable, or the job dies at some call to storage."""
        generation = self._newest_sealed()
        if generation is None or any(generation <= each for each in self.committed):
            return
        dying = CrashingBackend(self.backend, crash_at=crash_at, when=when)
        self._use(dying)
        for memory in self.own:
            memory.ring.pin(generation)
        try:
            self._persist(generation, retention)
        except Crashed:
            committed = any("_COMMITTED" in call for call in dying.calls[:-1] if call.startswith("create "))
            if committed:
                self._commit(generation)
                self._give_up(retention)  # it may have got that far
            self.restart("processes", stopped=False)
            return
        self._use(self.backend)
        for memory in self.own:
            memory.ring.unpin(generation)
        self._commit(generation)
        self._give_up(retention)

    def _persist(self, generation: GenerationId, retention: Retention) -> None:
        parts = [self._part(generation, rank) for rank in RANKS]
        kept = self.sources.get(self.previous, {}) if self.previous is not None else {}
        stored = {record.operator for record in parts[0][0].segments[0].records}
        self.sources[generation] = {**kept, **dict.fromkeys(stored, generation)}
        spares = self.spares.get(self.previous, {}) if self.previous is not None else {}
        self.spares[generation] = {
            **spares,
            **{expert: kept[expert] for expert in EXPERTS if expert in stored and expert in kept},
        }
        for rank, (marker, data) in zip(RANKS, parts, strict=True):
            self.store.put_segment(generation, rank, generation.step, memoryview(data))
            self.store.put_marker(marker)
        self.store.commit(parts[0][0], timeout=timedelta())
        self.store.retain(retention)

    def _part(self, generation: GenerationId, rank: int) -> tuple[RankMarker, bytes]:
        """What goes to storage: now and then everything, else one expert or none."""
        turn = generation.step % 5
        experts = EXPERTS if turn == 0 or self.previous is None else EXPERTS[turn - 1 : turn]
        previous = None
        if self.previous is not None:
            commits = {commit.generation: commit for commit in self.store.candidates()}
            previous = self.store.read_marker(commits[self.previous], rank)
        return part(self.store.run_id, generation, rank, world_size=len(RANKS), experts=experts, previous=previous)

    def _commit(self, generation: GenerationId) -> None:
        self.committed.add(generation)
        self.held.add(generation)
        self.previous = generation

    def _needs(self, generation: GenerationId) -> set[GenerationId]:
        return {*self.sources[generation].values()} - {generation}

    def _seconds(self, generations: Iterable[GenerationId]) -> set[GenerationId]:
        """What has their second copies and is still there."""
        return {spare for generation in generations for spare in self.spares[generation].values()} & self.held

    def collect(self, retention: Retention | None) -> None:
        """Somebody collects garbage."""
        collect_garbage(self.backend, retention)
        if retention is not None:
            self._give_up(retention)

    def wake_a_zombie(self, number: int) -> None:
        """A process of an earlier incarnation goes on with its save."""
        if not self.zombies:
            return
        zombie = self.zombies[number % len(self.zombies)]
        assert zombie.incarnation is not None
        late = zombie.name(self.step + number)
        if late in self.committed:
            return  # it has saved that, and does not do so again
        for rank in RANKS:
            zombie.put_segment(late, rank, late.step, memoryview(content(late, rank)))
            zombie.put_marker(self._marker(late, rank))
        for act in (
            lambda: zombie.commit(self._marker(late, 0), timeout=timedelta()),
            lambda: zombie.retain(Retention(last=1)),
        ):
            with contextlib.suppress(CheckpointError):
                act()
                raise AssertionError("a process of an earlier incarnation was not fenced")

    # -- death and restart

    def restart(self, lost: Loss, *, stopped: bool = True) -> None:
        """All processes die, perhaps with nodes; a new incarnation begins from the newest that is left of every rank.

        Args:
            lost: what goes with them.
            stopped: whether they only seem dead, as far as storage is concerned.
        """
        self.restarts += 1
        for memory in (*self.own, *self.copies):
            memory.die()
        for node in self._lost_nodes(lost):
            shutil.rmtree(node)
            node.mkdir()
        self.zombies = [*self.zombies, *([self.store] if stopped else [])][-3:]
        must = self._must_be_found(lost)
        self.store = RunStore.open(self.backend, resume="must")
        resumed, stocks = self._find()
        assert (resumed is None) <= (must is None), f"{must} is lost"
        assert must is None or (resumed is not None and resumed >= must), f"{must} is lost, {resumed} was found"
        self._begin(resumed, [item.version.generation for stock in stocks for item in stock.items])

    def _lost_nodes(self, lost: Loss) -> list[Path]:
        return {"processes": [], "node 0": self.nodes[:1], "node 1": self.nodes[1:], "cluster": self.nodes}[lost]

    def _must_be_found(self, lost: Loss) -> GenerationId | None:
        """The newest generation of which every rank's part must be somewhere."""
        gone = set(self._lost_nodes(lost))
        places: list[set[GenerationId]] = []
        for rank in RANKS:
            parts = set(self.committed)
            parts |= self.own[rank].needed if self.nodes[rank] not in gone else set()
            parts |= self.copies[rank].needed if self.nodes[1 - rank] not in gone else set()
            places.append(parts)
        return max(set.intersection(*places), default=None)

    def _find(self) -> tuple[GenerationId | None, list[Stock]]:
        """What the ranks agree on, every byte of it read."""
        self.store.promote()
        commits = {commit.generation: commit for commit in self.store.candidates()}
        self._check_offered(list(commits.values()))
        stocks = [self._stock(node) for node in self.nodes]
        inventory = Inventory.of([stock.plain() for stock in stocks], [Version(each, "p") for each in commits])
        alive = [version for version in inventory.all_versions if self.store.why_dead(version.generation) is None]
        versions = inventory.usable(alive)
        resumed = versions[0].generation if versions else None
        # What an incarnation that died was to give up may still be there.
        self.committed = set(commits)
        self.held = self.committed.union(self._seconds(commits), *(self._needs(each) for each in commits))
        return resumed, stocks

    def _check_offered(self, commits: Sequence[Commit]) -> None:
        """Latest never runs ahead of durability: what is offered is there, to the last byte, and is what was saved."""
        assert self.committed <= {commit.generation for commit in commits}
        for commit in commits:
            assert read_back(self.store, commit) == self.sources[commit.generation]
        assert self.store.unreadable == []

    def _stock(self, node: Path) -> Stock:
        """What is whole in the memory of a node; what it says it has, it has."""
        tier = HostTier(self.store.run_id, node)
        items = []
        for holding in tier.holdings():
            marker = tier.read_marker(holding)
            out = bytearray(marker.segments[0].nbytes)
            tier.read_into(holding, marker.segments[0], 0, memoryview(out))
            assert out == content(holding.generation, holding.owner)
            items.append(Item(Version(holding.generation, holding.plan_hash), holding.owner, "host"))
        tier.close()
        return Stock(str(node), tuple(items))

    def _begin(self, resumed: GenerationId | None, volatile: Iterable[GenerationId]) -> None:
        assert self.store.open_incarnation(resumed, volatile=frozenset(volatile)) is not None
        for rank in RANKS:
            self.own[rank].adopt(resumed, self.nodes[rank])
            self.copies[rank].adopt(resumed, self.nodes[1 - rank])
        self.step = 0 if resumed is None else resumed.step
        self.committed = {each for each in self.committed if resumed is not None and each.step <= resumed.step}
        self.held = self.committed.union(self._seconds(self.committed), *(self._needs(each) for each in self.committed))
        self.previous = max(self.committed, default=None)

    # -- the rules, taken literally

    def _give_up(self, retention: Retention) -> None:
        """What the retention does not keep, what nothing that it keeps needs, and no second copy for the newest."""
        newest = sorted(self.committed, reverse=True)
        uses_references = any(self._needs(each) or self.spares[each] for each in newest[:1])
        last = newest[: max(2, retention.last) if uses_references else retention.last]
        kept = set(last)
        if retention.every_n_steps is not None:
            for multiple in range(0, self.step + 1, retention.every_n_steps):
                bucket = [each for each in newest if multiple <= each.step < multiple + retention.every_n_steps]
                kept |= {min(bucket)} if bucket else set()
        self.held = kept.union(self._seconds(last), *(self._needs(each) for each in kept))
        self.committed = {each for each in self.held if self._needs(each) <= self.held}

    def _newest_sealed(self) -> GenerationId | None:
        """The newest generation that all ranks have in memory."""
        own = [set(memory.ring.complete) for memory in self.own]
        found = [
            each
            for each in set.intersection(*own)
            if isinstance(each, GenerationId) and each.incarnation == self.incarnation
        ]
        return max(found, default=None)

    def _use(self, backend: Backend) -> None:
        self.store._backend = backend
        assert self.store._coordination is not None
        self.store._coordination.log._backend = backend

    def _marker(self, generation: GenerationId, rank: int) -> RankMarker:
        return marker_of(self.store.run_id, generation, rank)

    def end(self) -> None:
        """Leave nothing in shared memory."""
        for memory in (*self.own, *self.copies):
            memory.ring.close()
        shutil.rmtree(self.root)
