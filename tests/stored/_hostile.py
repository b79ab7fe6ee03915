"""Histories that nobody wishes for: copies, backups put back, jobs that wake up late, lost logs, turned bits.

Lives of one rank run in this process over real directories and real rings. What each generation holds spells its whole
past, so that what a start finds tells whether it is of the past of its place as that stands.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
from door import Inventory, Item, Log, Reader, await_markers, publish

from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError, Fenced
from lightning_moe_ckpt.recovery import Version
from lightning_moe_ckpt.recovery._inventory import Request
from lightning_moe_ckpt.storage import (
    Commit,
    GenerationId,
    PosixBackend,
    RankMarker,
    Retention,
    RunStore,
    SegmentEntry,
    digest_of,
    repair_log,
)
from lightning_moe_ckpt.storage._catalog import read_catalog
from lightning_moe_ckpt.tiers import HostTier, ObjectTier, RankMemory, SegmentRing

NOW = timedelta()
SLOT = 4096
SLOTS = 4


@dataclass
class Place:
    """A directory, and what is true of it: everything here is copied and put back with it."""

    path: Path
    committed: dict[GenerationId, str] = field(default_factory=dict)
    """Pasts of this directory that were committed in it, by name; not those that were given up or left behind."""
    ever: set[GenerationId] = field(default_factory=set)
    """Names of all that was ever committed in it."""
    nonce: str = ""
    """Of the last job that was started here, as far as the directory tells."""


@dataclass
class Running:
    """An incarnation: dead, hung or at work."""

    place: Place
    store: RunStore
    memory: RankMemory
    past: str
    step: int
    seen: GenerationId | None


class World:
    """Places, their backups, and lives.

    Args:
        root: an empty directory.
        shared: shared memory of the node.
        draws: decides everything.
    """

    def __init__(self, root: Path, shared: Path, draws: random.Random) -> None:
        self._root, self._shared, self._draws = root, shared, draws
        self.places = [Place(root / "place0")]
        self.backups: list[tuple[Place, Place]] = []
        self.hung: list[Running] = []
        self.in_memory: dict[GenerationId, tuple[str, GenerationId | None]] = {}
        """Everything that was ever put into memory: its past, and the newest commit known then."""
        self.written: dict[GenerationId, str] = {}
        """Pasts of all that was stored as a whole, committed or not."""
        self.lives: list[str] = []
        """Names of all that were started, in that order."""
        self.ends: list[str] = []
        """How each start ended: `exact`, `older`, or the class of its error."""

    # -- lives

    def live(self, place: Place) -> None:
        """A start, some steps, and a death or a sleep."""
        life = self._start(place)
        if life is None:
            return
        for _ in range(self._draws.randrange(4)):
            self._step(life)
        if self._draws.random() < 0.3:
            self.hung.append(life)
        else:
            life.memory.close(unlink=False)

    def _start(self, place: Place) -> Running | None:
        backend = PosixBackend(place.path)
        try:
            store = RunStore.open(backend, resume="auto")
            for promoted in store.promote():
                assert promoted.nonce == place.nonce, f"{promoted} is not of the last job that {place.path} tells of"
                place.committed[promoted] = self.written[promoted]
                place.ever.add(promoted)
            commits = {Version(commit.generation, "p"): commit for commit in store.candidates()}
            resumed, past, foreign, volatile = self._find(place, store, commits)
        except CheckpointError as error:
            self.ends.append(type(error).__name__)
            return None
        if resumed is None and (store.unreadable or foreign):
            self.ends.append("NoUsableGeneration")  # as the session has it
            return None
        assert store.open_incarnation(resumed, volatile=volatile) is not None
        newest = max((each for each in place.committed), default=None)
        older = newest is not None and (resumed is None or resumed < newest)
        assert not older or store.unreadable, f"{newest} was passed over in silence for {resumed}"
        self.ends.append("older" if older else "exact")
        place.committed = {each: it for each, it in place.committed.items() if resumed and each <= resumed}
        memory = RankMemory(store.memory_tag, 0, url=store.place, directory=self._shared)
        memory.claim(resumed, offered=foreign)
        seen = max((each.generation for each in commits if resumed and each.generation <= resumed), default=None)
        memory.saw(seen)
        memory.make(SLOT, SLOTS)
        place.nonce = store.nonce
        self.lives.append(store.nonce)
        return Running(place, store, memory, past, 0 if resumed is None else resumed.step, seen)

    def _find(
        self, place: Place, store: RunStore, commits: dict[Version, Commit]
    ) -> tuple[GenerationId | None, str, list[GenerationId], list[GenerationId]]:
        """What is newest of the past of a place, with the past that it spells; what is of another; all in memory."""
        tier = HostTier(store.memory_tag, self._shared)
        with contextlib.closing(tier):
            reader = Reader(store.run_id, tier, ObjectTier(store, list(commits.values())))
            inventory = Inventory.of([reader.stock("node").plain()], commits)
            seen = inventory.offers.seen
            foreign = [v for v in inventory.in_memory if store.why_foreign(v.generation, seen.get(v)) is not None]
            alive = [v for v in inventory.all_versions if store.why_dead(v.generation) is None and v not in foreign]
            usable = inventory.usable(alive)
            volatile = [version.generation for version in inventory.in_memory]
            if not usable:
                return None, "", [each.generation for each in foreign], volatile
            version = usable[0]
            (copy, *_) = inventory.copies(version, 0)
            item = Item(version, 0, copy.file)
            (entry,) = reader.marker(item).segments
            out = bytearray(entry.nbytes)
            reader.read(Request(copy, 0, entry, 0, entry.nbytes, 0), memoryview(out))
            assert digest_of(bytes(out)) == entry.digest
            past = out.decode()
        self._expect_own_past(place, version.generation, past)
        return version.generation, past, [each.generation for each in foreign], volatile

    def _expect_own_past(self, place: Place, generation: GenerationId, past: str) -> None:
        """Right bits: committed in this directory as it stands, or put into memory by an incarnation that knew no more than it."""
        if place.committed.get(generation) == past:
            return
        held, seen = self.in_memory[generation]
        assert held == past, f"{generation} spells {past}, and was {held}"
        assert seen is None or seen in place.ever, f"{generation} followed {seen}, which {place.path} does not have"

    def _step(self, life: Running) -> None:
        """One generation, to memory unless that is full, and to storage if that is quick enough."""
        life.step += 1
        life.past += f"{life.store.nonce[:4]}{life.step};"
        generation, data = life.store.name(life.step), life.past.encode()
        marker = self._marker(life, generation, data)
        if self._draws.random() < 0.85:
            self._keep(life, generation, marker, data)
        if self._draws.random() < 0.6:
            life.store.put_segment(generation, 0, life.step, memoryview(data))
            life.store.put_marker(marker)
            self.written[generation] = life.past
            if self._draws.random() < 0.9:  # else it dies before the commit
                life.store.commit(marker, timeout=NOW)
                life.place.committed[generation] = life.past
                life.place.ever.add(generation)
                life.seen = generation
                life.memory.saw(generation)
                for gone in life.store.retain(Retention(last=3)):
                    life.place.committed.pop(gone, None)

    def _keep(self, life: Running, generation: GenerationId, marker: RankMarker, data: bytes) -> None:
        ring = self._ring_of(life)
        if ring is None:
            return
        ring.begin_window(generation)
        slot = ring.acquire(generation, life.step)
        slot.view[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        ring.seal(slot)
        ring.finish_window(generation)
        ring.publish(generation, marker)
        life.memory.complete_everywhere(generation)
        self.in_memory[generation] = (life.past, life.seen)

    def _ring_of(self, life: Running) -> SegmentRing | None:
        """Its memory, made again if somebody removed its name; `None` if a later job has that, as it is told then."""
        ring = life.memory.ring
        assert ring is not None
        if ring.is_named:
            return ring
        try:
            return life.memory.renew()
        except ConfigurationError as error:
            if "which has taken this run over" not in str(error):
                raise
            return None

    def _marker(self, life: Running, generation: GenerationId, data: bytes) -> RankMarker:
        key = f"{generation.prefix}rank00000.{life.step:012d}.safetensors"
        entry = SegmentEntry(step=life.step, key=key, nbytes=len(data), digest=digest_of(data))
        return RankMarker(
            run_id=life.store.run_id, rank=0, world_size=1, generation=generation, plan_hash="p", segments=(entry,),
            lineage=life.store.lineage,
        )  # fmt: skip

    # -- what befalls them

    def wake(self) -> None:
        """A job that hung goes on: as if nothing had been, if nothing has; else it is fenced, and commits too late."""
        if not self.hung:
            return
        life = self.hung.pop(self._draws.randrange(len(self.hung)))
        if life.place.nonce == life.store.nonce and (life.place.path / "_log").exists():
            with contextlib.suppress(Fenced):
                self._step(life)
        else:
            life.step += 1
            life.past += f"{life.store.nonce[:4]}late;"
            generation, data = life.store.name(life.step), life.past.encode()
            self.written[generation] = life.past
            marker = self._marker(life, generation, data)
            life.store.put_segment(generation, 0, life.step, memoryview(data))
            life.store.put_marker(marker)
            try:
                life.store.commit(marker, timeout=NOW)
                raise AssertionError(f"{generation} was committed by a job that another one had followed")
            except CheckpointError:
                backend = PosixBackend(life.place.path)
                history = Log(backend).read()
                if history is not None:  # it had looked at the log before
                    publish(backend, await_markers(backend, marker, timeout=NOW), history)
        life.memory.close(unlink=False)

    def copy(self) -> None:
        """`cp -r`."""
        place = self._draws.choice(self.places)
        if len(self.places) < 3 and place.path.exists():
            self.places.append(self._copied(place, self._root / f"place{len(self.places)}"))

    def back_up(self) -> None:
        place = self._draws.choice(self.places)
        if place.path.exists():
            self.backups.append((place, self._copied(place, self._root / f"backup{len(self.backups)}")))

    def put_back(self) -> None:
        if not self.backups:
            return
        place, backup = self._draws.choice(self.backups)
        shutil.rmtree(place.path, ignore_errors=True)
        shutil.copytree(backup.path, place.path)
        place.committed, place.ever, place.nonce = dict(backup.committed), set(backup.ever), backup.nonce

    def _copied(self, place: Place, path: Path) -> Place:
        shutil.copytree(place.path, path)
        return Place(path, dict(place.committed), set(place.ever), place.nonce)

    def lose_log(self) -> None:
        """The next start refuses, or there was nothing to lose; the log is made again from what is there."""
        place = self._draws.choice(self.places)
        if not (place.path / "_log").exists():
            return
        shutil.rmtree(place.path / "_log")
        place.nonce = ""
        before, had = len(self.ends), bool(place.committed)
        self.live(place)
        if had:
            assert self.ends[before:] == ["NoUsableGeneration"]
            self._repair(place)

    def _repair(self, place: Place) -> None:
        """All that is stored of the line of the incarnation that began last, of those that committed something, and nothing else.

        A late commit counts as one: lives that have followed and committed nothing were known to the log alone. What
        that incarnation's log had given up, and a backup has brought back, stays given up.
        """
        backend = PosixBackend(place.path)
        stored = [each for each, contents in read_catalog(backend).items() if contents.committed]
        newest = max(stored, key=lambda each: (self.lives.index(each.nonce), each.step))
        line = {each for each in stored if self.written[newest].startswith(self.written[each])}
        found = repair_log(backend, dry_run=False)
        line -= {each for each, reason in found.left_out.items() if reason.startswith("below the watermark")}
        assert line == {*found.usable}, f"{line ^ {*found.usable}} are on one side only, the newest is {newest}"
        assert newest in line
        place.committed = {each: self.written[each] for each in line}
        place.ever |= line
        place.nonce = newest.nonce

    def lose_snap(self) -> None:
        """The next start refuses; then everything is gone for good."""
        place = self._draws.choice(self.places)
        if not (place.path / "snap").exists():
            return
        shutil.rmtree(place.path / "snap")
        had, place.committed, place.ever = bool(place.committed), {}, set()
        before = len(self.ends)
        self.live(place)
        # Memory from before the first commit is of this past too; that storage has lost something is a warning then.
        assert not had or self.ends[before:] in (["NoUsableGeneration"], ["exact"]), self.ends[before:]
        shutil.rmtree(place.path)
        place.committed, place.ever, place.nonce = {}, set(), ""

    def turn_a_bit(self) -> None:
        """In the newest manifest of a place."""
        place = self._draws.choice(self.places)
        if not place.committed:
            return
        path = place.path / f"{max(place.committed).prefix}_COMMITTED"
        data = bytearray(path.read_bytes())
        data[self._draws.randrange(len(data))] ^= 1 << self._draws.randrange(8)
        path.write_bytes(data)

    # -- a whole history

    def run(self, num_events: int) -> None:
        """Events, each followed by a start somewhere."""
        self.live(self.places[0])
        events = [self.wake, self.copy, self.back_up, self.put_back, self.lose_log, self.lose_snap, self.turn_a_bit]
        for event in self._draws.choices(events, weights=[4, 2, 3, 4, 1, 1, 1], k=num_events):
            event()
            self.live(self._draws.choice(self.places))

    def end(self) -> None:
        """Let go of all memory."""
        for life in self.hung:
            life.memory.close(unlink=True)
