"""Manage the rings of one rank: the ring in use, and older rings until it holds a complete generation.

A new process finds the previous process's rings. The ring of a dead process is claimed in place and used again if it
fits. The ring of a living process (stopped, or of a job started twice) stays that process's: it may be read, and only
its name is removed, so that its owner keeps its pages. A ring that does not fit, or was replaced by a larger ring, is
kept too. All of these go once a generation in the ring in use is complete on all ranks: if the process is killed
before, in the middle of replay, the next process finds them again.

A claimed ring keeps only the generation resumed from. Any other is older, or belongs to a time line that the new
process has left. Older generations are kept too if only several together have the whole state.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import ConfigurationError, Corrupt
from lightning_moe_ckpt.process import Balance
from lightning_moe_ckpt.storage import RING_HEADER_NBYTES, GenerationId, SlotClass, digest_of, full_records
from lightning_moe_ckpt.tiers._ring import SegmentRing
from lightning_moe_ckpt.tiers._ring_state import read_header, read_statement
from lightning_moe_ckpt.tiers._shm import (
    FileId,
    MemoryKind,
    MemoryName,
    close_shared,
    file_id,
    is_owned_elsewhere,
    is_private_file,
    listing,
    marker_files,
    marker_paths,
    memory_files,
    open_shared,
    orphaned_markers,
    remove_shared,
    shared_directory,
    shared_name,
    unlink_shared_file,
)

log = rank_logger(__name__)

_WASTE = 1.25
"""Largest ratio of a claimed ring's bytes to the bytes needed for the ring to be used again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryClaim:
    """Identity of a run's memory, and facts about storage at the process's start."""

    tag: str
    """Tag of the run at its place."""
    run_id: str
    """Name of the run, independent of its place."""
    url: str
    """URL of the run, as in `RunStore.place`."""
    offered: frozenset[GenerationId] = frozenset()
    """Generations in memory outside storage's history; users may ask for them at the next start."""
    seen: GenerationId | None = None
    """Newest commit."""
    world_size: int = 0
    """Number of ranks of this incarnation, after which no rank's memory is in use."""


class RankMemory:
    """Memory of one rank of a run in this node's shared memory: a `ring` for its own captures, or a `replica`, for
    segments that this process keeps for the rank.

    The run's URL identifies memory of replaced runs, `tag` the run's at its place. The directory is by default as in
    `shared_directory`.
    """

    def __init__(
        self, tag: str, rank: int, *, url: str, directory: Path | None = None, kind: MemoryKind = "ring"
    ) -> None:
        self._tag, self._kind, self.rank = tag, kind, rank
        self._origin = digest_of(url.encode())
        self._directory = directory if directory is not None else shared_directory()
        self.ring: SegmentRing | None = None
        """Ring in use."""
        self.on_ring: Callable[[SegmentRing], object] = lambda _: None
        """Called with each ring that is put into use."""
        self._kept: list[SegmentRing] = []
        self._of_gone: list[SegmentRing] = []
        """Rings and copies of ranks that this incarnation does not have, until the generation in them is not needed."""
        self._offered: list[SegmentRing] = []
        """Unused rings with generations outside storage's history, kept while there is room."""
        self._seen: GenerationId | None = None
        self._foreign: list[tuple[Path, FileId]] = []
        """Memory of living processes: names, and the files that they led to."""
        self._moved_are_removed = False

    @property
    def published(self) -> list[GenerationId]:
        """Generations that a later process would find here."""
        return [generation for ring in (*self._all(), *self._of_gone) for generation in ring.published]

    @property
    def copies(self) -> dict[str, GenerationId]:
        """Newest generation with a full record that a later process would find here, by operator."""
        rings = [*self._all(), *self._of_gone]
        markers = sorted((marker for ring in rings for marker in ring.markers), key=lambda each: each.generation)
        return {record.operator: marker.generation for marker in markers for _, record in full_records(marker)}

    @property
    def accounts(self) -> list[Balance]:
        """Accounts that earlier processes of this rank have left here."""
        rings = [*self._all(), *self._of_gone, *self._offered]
        return [found for ring in rings if (found := Balance.read(bytes(ring.account))) is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all rings that this process owns."""
        return sum(ring.nbytes for ring in (*self._all(), *self._of_gone, *self._offered))

    def saw(self, committed: GenerationId | None) -> None:
        """Note the newest commit, to be stated in later markers. From any thread."""
        self._seen = committed
        for ring in self._all():
            ring.seen = committed

    # -- start

    def claim(
        self,
        resumed: GenerationId | None,
        *,
        older: bool = False,
        offered: Collection[GenerationId] = (),
        world_size: int = 0,
    ) -> None:
        """Take over the memory of earlier processes of this rank, once the generation to resume from is known.
        `resumed` is kept until a newer generation is complete; all others go but, with `older`, those before, since
        `resumed` lacks some of the state.

        A ring with a generation `offered`, of another history that users may still ask for, is not changed. Memory of
        ranks beyond `world_size` is shared out among them.
        """
        self._remove_replaced_runs()
        for path, name in memory_files(self._directory, self._tag):
            if self._is_own(name):
                with contextlib.suppress(FileNotFoundError):
                    self._claim(path, resumed, older=older, offered=offered)
            elif name.tag == self._tag and 0 < world_size <= name.owner and name.owner % world_size == self.rank:
                self._of_gone += [ring for ring in [_adopted(path)] if ring is not None]
        for path, name in orphaned_markers(self._directory):
            if self._is_own(name):
                remove_shared(path)

    def make(
        self,
        slot_nbytes: int,
        num_slots: int,
        *,
        block: int = 1,
        keep: int = 1,
        small: Sequence[SlotClass] = (),
        experts: Mapping[str, int] = MappingProxyType({}),
    ) -> SegmentRing:
        """Put a ring into use and return it: an earlier incarnation's if the size fits, else a new ring. If there is no
        room beside them, earlier incarnations' rings are given up.

        The ring has `num_slots` for segments, `block` of them for a generation, of which `keep` complete ones are kept;
        for `experts` see `SegmentRing.experts`. Raises like `expect_room`; `ring` is then the previous one again, whose
        memory may have been given up, see `renew`.
        """
        claimed = next((ring for ring in self._kept if _suits(ring, slot_nbytes, num_slots, small)), None)
        before, self.ring = self.ring, None
        if before is not None:
            self._kept.append(before)
        if claimed is not None:
            self._kept.remove(claimed)
            log.info("ring %s of an earlier incarnation goes on being used", claimed.path)
        self._close([ring for ring in self._kept if not ((ring.complete or ring.published) and ring.is_named)])
        try:
            self.ring = claimed if claimed is not None else self._create(slot_nbytes, num_slots, small)
        except ConfigurationError:
            # The memory may have been given up for a second attempt: then it has no name, and `renew` makes it again.
            self._kept, self.ring = [ring for ring in self._kept if ring is not before], before
            raise
        self.ring.keep, self.ring.seen, self.ring.experts = keep, self._seen, experts
        self.ring.lay(block)
        self.on_ring(self.ring)
        return self.ring

    def renew(self) -> SegmentRing:
        """Return a new ring of the same size for the ring in use, whose name is gone: no later process would find it.
        Current readers of the old ring may go on; its memory is released with the last reader. Raises
        `ConfigurationError` if there is no room yet, so call again later, or a later start of the run has taken the
        ring over.
        """
        lost = self.ring
        assert lost is not None
        for generation in lost.published:
            lost.discard(generation)
        lost.close(unlink=False)
        self._close([ring for ring in self._kept if not ring.is_named])
        for path, name in memory_files(self._directory):  # a later start of the run has no need of this rank's ring
            if self._is_own(name) and is_owned_elsewhere(path):
                raise ConfigurationError(
                    f"{path} belongs to another process that lives, which has taken this run over. Stop this process, or "
                    "give one of the two jobs another URL."
                )
        with contextlib.suppress(OSError):  # the next use of the directory reports it
            self._directory.mkdir(mode=0o700, exist_ok=True)
        self.ring = self._create(lost.slot_nbytes, lost.num_slots, lost.header.small)
        self.ring.keep, self.ring.seen, self.ring.experts = lost.keep, self._seen, lost.experts
        self.ring.lay(lost.block)
        self.on_ring(self.ring)
        log.warning(
            "the name of ring %s was removed by something else; %s takes its place. Keep what tidies up %s, and logouts "
            "(`RemoveIPC=yes`), away from `moe-ckpt-*`",
            lost.path,
            self.ring.path,
            self._directory,
        )
        return self.ring

    def view(self, generation: GenerationId, step: int) -> Tensor | None:
        """Return memory that begins with a published generation's segment; `None` if the generation is not here."""
        return next((view for ring in self._all() if (view := ring.view(generation, step)) is not None), None)

    # -- completion

    def complete_everywhere(self, generation: GenerationId) -> None:
        """Drop older generations and unused rings: all ranks hold `generation` in memory."""
        for ring in self._all():
            if generation in ring.complete:
                ring.complete_everywhere(generation)
                if ring is self.ring and ring.holds_all:
                    self._forget_others()
                    self._remove_moved(generation)

    def give_up(self, generation: GenerationId) -> None:
        """Stop keeping `generation` for other ranks: some rank will never hold it in memory."""
        for ring in self._all():
            ring.give_up(generation)

    # -- the end

    def close(self, *, unlink: bool) -> None:
        """Release all memory, and with `unlink` remove the names too; otherwise names stay if a later process could
        restore something. Closing twice is allowed.
        """
        newest = max(self.published, default=None)
        rings, self._kept, self.ring = [*self._all(), *self._of_gone, *self._offered], [], None
        self._of_gone, self._offered = [], []
        for ring in rings:
            nothing = not ring.published
            ring.close(unlink=unlink or nothing)
            if not unlink and not nothing:
                log.info("ring %s stays for the next start of this run", ring.path)
        if unlink:
            self._remove_foreign()
            self._remove_dead()
            if newest is not None:  # so that ranks of before, and moved ones, leave nothing here either
                self._moved_are_removed = False
                self._remove_moved(newest)

    def unlink(self) -> None:
        """Remove all names of this rank without logging: for a process's last moment, from any thread."""
        for ring in (*self._all(), *self._of_gone):
            ring.unlink()

    # -- private

    def _all(self) -> list[SegmentRing]:
        return [*self._kept, *([self.ring] if self.ring is not None else [])]

    def _is_own(self, name: MemoryName) -> bool:
        return (name.tag, name.owner, name.kind) == (self._tag, self.rank, self._kind)

    def _claim(
        self, path: Path, resumed: GenerationId | None, *, older: bool, offered: Collection[GenerationId]
    ) -> None:
        """Take over a file. Raises `FileNotFoundError` if the file is gone meanwhile."""
        found = file_id(path)
        try:
            ring = SegmentRing.adopt(path)
        except Corrupt as error:
            # A process that dies while it reserves memory leaves an empty file, or zeros: nothing is amiss.
            with path.open("rb") as file:
                begun = any(file.read(RING_HEADER_NBYTES))
            log.log(
                logging.WARNING if begun else logging.INFO,
                "%s is not used and goes: its process died while making it, or another release has. %s",
                path,
                error,
            )
            _remove(path)
            return
        if ring is None:
            log.warning("ring %s belongs to a process that still lives; this one makes another", path)
            self._foreign.append((path, found))
            return
        if any(generation in offered for generation in ring.published):
            self._offered.append(ring)
            return
        for generation in ring.published:
            if resumed is None or generation > resumed or (generation < resumed and not older):
                ring.discard(generation)
        self._kept.append(ring)

    def _create(self, slot_nbytes: int, num_slots: int, small: Sequence[SlotClass]) -> SegmentRing:
        try:
            return self._create_beside(slot_nbytes, num_slots, small)
        except ConfigurationError:
            if not self._kept and not self._foreign and not self._offered and not self._of_gone:
                raise
        log.warning("no room for a new ring beside what an earlier one holds, which is given up")
        self._forget_others()
        offered, self._offered = self._offered, []
        self._close(offered)
        return self._create_beside(slot_nbytes, num_slots, small)

    def _create_beside(self, slot_nbytes: int, num_slots: int, small: Sequence[SlotClass]) -> SegmentRing:
        """Create a ring under a name that is not in use."""
        taken = set(listing(self._directory))  # by any process
        for turn in itertools.count():
            if (name := shared_name(self._tag, self.rank, self._kind, turn=turn)) not in taken:
                with contextlib.suppress(FileExistsError):  # another process was quicker
                    return SegmentRing.create(
                        name, slot_nbytes, num_slots, self._directory, small=small, origin=self._origin
                    )
            is_private_file(self._directory / name, say=True)
        raise AssertionError

    def _close(self, rings: list[SegmentRing]) -> None:
        self._kept = [ring for ring in self._kept if ring not in rings]
        for ring in rings:
            ring.close(unlink=True)

    def _forget_others(self) -> None:
        self._close([*self._kept, *self._of_gone])
        self._of_gone = []
        self._remove_foreign()

    def _remove_foreign(self) -> None:
        """Remove the names of living processes' memory, unless a name leads to another file now: a later process's."""
        foreign, self._foreign = self._foreign, []
        for path, found in foreign:
            with contextlib.suppress(FileNotFoundError):
                if file_id(path) == found:
                    _remove(path)

    def _remove_dead(self) -> None:
        """Remove memory of a process of this rank that ran beside this process and was killed."""
        for path, name in memory_files(self._directory):
            if self._is_own(name) and (ring := _adopted(path)) is not None:
                ring.close(unlink=True)

    def _remove_moved(self, generation: GenerationId) -> None:
        """Remove memory of this run's ranks on other nodes now; once per process, since ranks move only
        between starts.

        All ranks hold `generation` in memory of this kind, so a dead process's file with older generations only is not
        needed.
        """
        if self._moved_are_removed:
            return
        self._moved_are_removed = True
        for path, name in memory_files(self._directory):
            if (name.tag, name.kind) == (self._tag, self._kind) and name.owner != self.rank:
                try:
                    ring = _adopted(path)
                except OSError as error:  # training goes on with less room
                    log.info("%s cannot be looked at, and stays: %s", path, error)
                    continue
                if ring is not None:
                    if older := all(each < generation for each in ring.published):
                        log.info("%s is of a rank that is on another node now", path)
                    ring.close(unlink=older)

    def _remove_replaced_runs(self) -> None:
        """Remove memory of other runs' dead processes under the same URL: those runs cannot be resumed any more."""
        for path, name in memory_files(self._directory):
            replaced = name.tag != self._tag and _origin(path) == self._origin
            if replaced and (ring := _adopted(path)) is not None:
                log.info("%s belongs to a run which another one under this URL has replaced", path)
                ring.close(unlink=True)


def log_unused_memory(claim: MemoryClaim, rank: int, resumed: GenerationId | None) -> None:
    """Log the memory of this run's rank, on this node, that the rank's process cannot use, and why.

    Either its name is from before the run's log was repaired: then its file goes at a start once its owner is dead. Or
    it was taken at another place: by a copy of the run's folder, whose job may be alive, or by this folder before it
    was moved.
    """
    origin = digest_of(claim.url.encode())
    for path, name in memory_files(shared_directory()):
        if name.owner != rank or name.tag == claim.tag:
            continue
        markers = [said.marker for each in marker_paths(path) if (said := read_statement(each)) is not None]
        if held := [marker.generation for marker in markers if marker.run_id == claim.run_id]:
            why = (
                "from before its log was repaired. What led to it is not known any more, and it is removed"
                if _origin(path) == origin
                else f"taken while it was stored elsewhere than at {claim.url}: that is a copy, or was moved. It is not used. "
                "To go on from it, start the run where it was; if it was moved for good, remove the file and those whose names "
                "begin with it"
            )
            older = resumed is not None and max(held) < resumed
            log.log(logging.INFO if older else logging.WARNING, "%s has %s of this run, %s", path, max(held), why)


def _suits(ring: SegmentRing, slot_nbytes: int, num_slots: int, small: Sequence[SlotClass]) -> bool:
    large_enough = ring.slot_nbytes >= slot_nbytes and ring.num_slots >= num_slots and ring.header.small == tuple(small)
    return large_enough and ring.slot_nbytes * ring.num_slots <= _WASTE * slot_nbytes * num_slots


def _adopted(path: Path) -> SegmentRing | None:
    """Adopt the ring of a dead process; `None` if the process is alive, or if there is no ring."""
    try:
        return SegmentRing.adopt(path)
    except (FileNotFoundError, Corrupt):
        return None


def _remove(path: Path) -> None:
    unlink_shared_file(path)  # first: see `SegmentRing.publish`
    for marker in marker_files(path):
        remove_shared(marker)


def _origin(path: Path) -> str | None:
    """Return the origin in a ring's header, the digest of its run's URL; `None` if it has none."""
    try:
        descriptor = open_shared(path)
    except OSError:
        return None
    try:
        with open(descriptor, "rb", closefd=False) as file:
            return read_header(file.read(RING_HEADER_NBYTES), file.seek(0, 2), str(path)).origin
    except Corrupt:
        return None
    finally:
        close_shared(descriptor)
