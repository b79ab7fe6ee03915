"""The rings of one rank: the one in use, and those that are kept until it holds a generation of its own.

A new life finds what the last one left. The ring of a dead process is claimed in place and goes on being used if it
fits. The ring of a process that still lives (stopped, or of a job that was started twice) stays that process's: it
may be read, and goes by name only, so that its owner keeps its pages to itself. A ring that does not fit, or that a
larger one has replaced, is kept too. All of these go once a generation is complete on all ranks in the ring in use:
a life that is killed before that, in the middle of replay, finds them again.

Of what a claimed ring holds, only the generation that was resumed from is kept: the others are older, or belong to a
time line that the new life has left. Older ones are kept too where several generations together have all of the state.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lightning_moe_ckpt.errors import ConfigurationError, Corrupt
from lightning_moe_ckpt.storage import RING_HEADER_NBYTES, GenerationId, digest_of, full_records
from lightning_moe_ckpt.tiers._names import (
    Kind,
    MemoryName,
    listing,
    marker_files,
    marker_paths,
    memory_files,
    orphaned_markers,
    shared_name,
)
from lightning_moe_ckpt.tiers._ring import SegmentRing, read_header, read_statement
from lightning_moe_ckpt.tiers._shm import (
    FileId,
    close_shared,
    file_id,
    is_own_file,
    is_owned_elsewhere,
    open_shared,
    remove_shared,
    shared_directory,
    unlink_shared_file,
)

log = logging.getLogger(__name__)

_WASTE = 1.25
"""A claimed ring is used again if it has at most so many times the bytes that are needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryClaim:
    """How memory of a run is found by one life of it, and what the life knows of storage when it begins."""

    tag: str
    """Of the run at its place."""
    run_id: str
    """Of the run, wherever it is."""
    url: str
    """Of the run, as `RunStore.place` has it."""
    offered: frozenset[GenerationId] = frozenset()
    """Generations in memory of another past than storage's, which users may ask for with the next start."""
    seen: GenerationId | None = None
    """The newest commit."""


class RankMemory:
    """What one rank of a run has in this node's shared memory.

    Args:
        tag: of the run at its place.
        rank: whose segments it holds.
        url: of the run; what replaced runs left is found by it.
        directory: of shared memory; default as in `shared_directory`.
        kind: `ring` for what the rank captures itself, `replica` for what this process keeps for it.
    """

    def __init__(self, tag: str, rank: int, *, url: str, directory: Path | None = None, kind: Kind = "ring") -> None:
        self._tag, self._rank, self._kind = tag, rank, kind
        self._origin = digest_of(url.encode())
        self._directory = directory if directory is not None else shared_directory()
        self._ring: SegmentRing | None = None
        self._kept: list[SegmentRing] = []
        self._offered: list[SegmentRing] = []
        """With what storage has another past than; nothing of it is used, and it is kept as long as there is room."""
        self._seen: GenerationId | None = None
        self._foreign: list[tuple[Path, FileId]] = []
        """Of processes that live: names, and which files they led to."""
        self._moved_are_removed = False

    @property
    def ring(self) -> SegmentRing | None:
        """The one in use."""
        return self._ring

    @property
    def published(self) -> list[GenerationId]:
        """Generations that a later life would find here."""
        return [generation for ring in self._all() for generation in ring.published]

    @property
    def rank(self) -> int:
        """Whose segments it holds."""
        return self._rank

    @property
    def copies(self) -> dict[str, GenerationId]:
        """Newest generation that a later life would find here, by operator of which it has a full record."""
        markers = sorted((each for ring in self._all() for each in ring.markers), key=lambda each: each.generation)
        return {record.operator: each.generation for each in markers for _, record in full_records(each)}

    @property
    def nbytes(self) -> int:
        """Of all rings that this process owns."""
        return sum(ring.nbytes for ring in (*self._all(), *self._offered))

    def saw(self, committed: GenerationId | None) -> None:
        """Storage has a generation: what is published from here on says that it was known. From any thread."""
        self._seen = committed
        for ring in self._all():
            ring.seen = committed

    # -- start

    def claim(
        self, resumed: GenerationId | None, *, older: bool = False, offered: Collection[GenerationId] = ()
    ) -> None:
        """Take over what earlier lives of this rank left, once it is known what this life resumes from.

        Args:
            resumed: kept until something newer is complete; everything else goes, all of it for `None`.
            older: whether generations before that are kept too, since it has not all of the state.
            offered: generations of another past that users may still ask for; a ring with one is left as it is.
        """
        self._remove_replaced_runs()
        for path, name in memory_files(self._directory):
            if self._is_own(name):
                with contextlib.suppress(FileNotFoundError):
                    self._claim(path, resumed, older=older, offered=offered)
        for path, name in orphaned_markers(self._directory):
            if self._is_own(name):
                remove_shared(path)

    def make(self, slot_nbytes: int, num_slots: int, *, keep: int = 1) -> SegmentRing:
        """The ring to use from here on: one that was claimed, if it fits, or a new one. If there is no room, that of before.

        Args:
            slot_nbytes: of the largest segment.
            num_slots: see `slots_needed`.
            keep: generations to keep that are complete on all ranks.

        Raises:
            ConfigurationError: there is no room; the message says how many bytes are missing.
        """
        claimed = next((ring for ring in self._kept if _suits(ring, slot_nbytes, num_slots)), None)
        before, self._ring = self._ring, None
        if before is not None:
            self._kept.append(before)
        if claimed is not None:
            self._kept.remove(claimed)
            log.info("ring %s of an earlier life goes on being used", claimed.path)
        self._close([ring for ring in self._kept if not (ring.complete and ring.is_named)])
        try:
            self._ring = claimed if claimed is not None else self._create(slot_nbytes, num_slots)
        except ConfigurationError:
            # Its memory may have been given up for a second attempt: then it has no name, and `renew` makes it again.
            self._kept, self._ring = [ring for ring in self._kept if ring is not before], before
            raise
        self._ring.keep, self._ring.seen = keep, self._seen
        return self._ring

    def renew(self) -> SegmentRing:
        """A ring of the same size in place of the one in use, whose name is gone: no later life would find that one.

        Who reads from the old one already may go on; its memory goes with the last of them.

        Raises:
            ConfigurationError: there is no room yet, or a later start of the run has removed the name. Call it again later.
        """
        lost = self._ring
        assert lost is not None
        for generation in lost.published:
            lost.discard(generation)
        lost.close(unlink=False)
        self._close([ring for ring in self._kept if not ring.is_named])
        self._expect_no_successor()
        with contextlib.suppress(OSError):  # said by what needs it
            self._directory.mkdir(mode=0o700, exist_ok=True)
        self._ring = self._create(lost.slot_nbytes, lost.num_slots)
        self._ring.keep, self._ring.seen = lost.keep, self._seen
        log.warning(
            "the name of ring %s was removed by something else; %s takes its place. Keep what tidies up %s, and logouts "
            "(`RemoveIPC=yes`), away from `moe-ckpt-*`",
            lost.path,
            self._ring.path,
            self._directory,
        )
        return self._ring

    def view(self, generation: GenerationId, step: int) -> Tensor | None:
        """Memory that begins with a segment of a published generation; `None` if it is not here."""
        return next((view for ring in self._all() if (view := ring.view(generation, step)) is not None), None)

    # -- completion

    def complete_everywhere(self, generation: Hashable) -> None:
        """All ranks hold `generation` in memory: what is older goes, and rings that are not in use any more."""
        for ring in self._all():
            if generation in ring.complete:
                ring.complete_everywhere(generation)
                if ring is self._ring and len(ring.complete) >= ring.keep:
                    self._forget_others()
                    self._remove_moved(generation)

    def give_up(self, generation: Hashable) -> None:
        """Some rank will never hold `generation` in memory: nobody waits for it any more."""
        for ring in self._all():
            ring.give_up(generation)

    # -- the end

    def close(self, *, unlink: bool) -> None:
        """Let go of all memory. Closing twice is allowed.

        Args:
            unlink: whether the names go too; else they stay where a later life could restore something.
        """
        rings, self._kept, self._ring = [*self._all(), *self._offered], [], None
        self._offered = []
        for ring in rings:
            nothing = not ring.published
            ring.close(unlink=unlink or nothing)
            if not unlink and not nothing:
                log.info("ring %s stays for the next start of this run", ring.path)
        if unlink:
            self._remove_foreign()
            self._remove_dead()

    def unlink(self) -> None:
        """Remove all names of this rank without a word: for the last moment of a process, from any thread."""
        for ring in self._all():
            ring.unlink()

    # -- private

    def _all(self) -> list[SegmentRing]:
        return [*self._kept, *([self._ring] if self._ring is not None else [])]

    def _is_own(self, name: MemoryName) -> bool:
        return (name.tag, name.owner, name.kind) == (self._tag, self._rank, self._kind)

    def _claim(
        self, path: Path, resumed: GenerationId | None, *, older: bool, offered: Collection[GenerationId]
    ) -> None:
        """Take a file over. Raises `FileNotFoundError` if it is gone meanwhile."""
        found = file_id(path)
        try:
            ring = SegmentRing.adopt(path)
        except Corrupt:  # torn while it was made
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

    def _expect_no_successor(self) -> None:
        """A later start of the run has a ring of this rank, and removed the name of ours: what we hold is not wanted."""
        for path, name in memory_files(self._directory):
            if self._is_own(name) and is_owned_elsewhere(path):
                raise ConfigurationError(
                    f"{path} belongs to another process that lives, which has taken this run over. Stop this process, or "
                    "give one of the two jobs another URL."
                )

    def _create(self, slot_nbytes: int, num_slots: int) -> SegmentRing:
        try:
            return self._create_beside(slot_nbytes, num_slots)
        except ConfigurationError:
            if not self._kept and not self._foreign and not self._offered:
                raise
        log.warning("no room for a new ring beside what an earlier one holds, which is given up")
        self._forget_others()
        offered, self._offered = self._offered, []
        self._close(offered)
        return self._create_beside(slot_nbytes, num_slots)

    def _create_beside(self, slot_nbytes: int, num_slots: int) -> SegmentRing:
        """A ring under a name that nothing has which is still needed."""
        taken = {path.name for path in listing(self._directory)}  # whoever has made it
        for turn in itertools.count():
            name = shared_name(self._tag, self._rank, self._kind, turn=turn)
            if name not in taken:
                with contextlib.suppress(FileExistsError):  # somebody was quicker
                    return SegmentRing.create(name, slot_nbytes, num_slots, self._directory, origin=self._origin)
            if not is_own_file(self._directory / name):
                log.warning(
                    "%s is no file of this user: it is left alone, and another name used", self._directory / name
                )
        raise AssertionError

    def _close(self, rings: list[SegmentRing]) -> None:
        self._kept = [ring for ring in self._kept if ring not in rings]
        for ring in rings:
            ring.close(unlink=True)

    def _forget_others(self) -> None:
        self._close(self._kept)
        self._remove_foreign()

    def _remove_foreign(self) -> None:
        """Not what has got the name since: that is a later life's."""
        foreign, self._foreign = self._foreign, []
        for path, found in foreign:
            with contextlib.suppress(FileNotFoundError):
                if file_id(path) == found:
                    _remove(path)

    def _remove_dead(self) -> None:
        """What a life of this rank left that ran beside this one and was killed."""
        for path, name in memory_files(self._directory):
            ring = _adopted(path) if self._is_own(name) else None
            if ring is not None:
                ring.close(unlink=True)

    def _remove_moved(self, generation: Hashable) -> None:
        """What ranks of this run left here that are on other nodes now; once per life, since they moved before it.

        All ranks hold `generation` in memory of this kind: dead files without anything as new are of no use.
        """
        if self._moved_are_removed or not isinstance(generation, GenerationId):
            return
        self._moved_are_removed = True
        for path, name in memory_files(self._directory):
            if name.tag == self._tag and name.kind == self._kind and name.owner != self._rank:
                _remove_if_older(path, generation)

    def _remove_replaced_runs(self) -> None:
        """What dead processes left of other runs under the same URL, which nobody can resume any more."""
        for path, name in memory_files(self._directory):
            if name.tag != self._tag and _origin(path) == self._origin:
                _remove_if_dead(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnusedMemory:
    """Memory of a rank of a run under a name that the run does not have any more, or has at another place."""

    path: Path
    newest: GenerationId
    """Generation in it."""
    here: bool
    """Whether it is of this place, of before the log was repaired: then `RankMemory.claim` removes it, once its owner is dead.
    Else it is of a copy of the run's folder, whose job may live, or of this folder before it was moved."""


def unused_memory(claim: MemoryClaim, rank: int, directory: Path | None = None) -> list[UnusedMemory]:
    """What there is of a rank of this run, on this node, that its life cannot use."""
    origin = digest_of(claim.url.encode())
    found: list[UnusedMemory] = []
    for path, name in memory_files(directory if directory is not None else shared_directory()):
        if name.owner == rank and name.tag != claim.tag:
            markers = [said.marker for each in marker_paths(path) if (said := read_statement(each)) is not None]
            held = [marker.generation for marker in markers if marker.run_id == claim.run_id]
            if held:
                found.append(UnusedMemory(path=path, newest=max(held), here=_origin(path) == origin))
    return found


def _suits(ring: SegmentRing, slot_nbytes: int, num_slots: int) -> bool:
    large_enough = ring.slot_nbytes >= slot_nbytes and ring.num_slots >= num_slots
    return large_enough and ring.slot_nbytes * ring.num_slots <= _WASTE * slot_nbytes * num_slots


def _adopted(path: Path) -> SegmentRing | None:
    """The ring of a dead process; `None` if it lives, or if there is none."""
    try:
        return SegmentRing.adopt(path)
    except (FileNotFoundError, Corrupt):
        return None


def _remove_if_older(path: Path, generation: GenerationId) -> None:
    """Remove the memory of a dead process unless it has something as new."""
    try:
        ring = _adopted(path)
    except OSError as error:  # training goes on with less room
        log.info("%s cannot be looked at, and stays: %s", path, error)
        return
    if ring is None:
        return
    older = all(each < generation for each in ring.published)
    if older:
        log.info("%s is of a rank that is on another node now", path)
    ring.close(unlink=older)


def _remove_if_dead(path: Path) -> None:
    ring = _adopted(path)
    if ring is not None:
        log.info("%s belongs to a run which another one under this URL has replaced", path)
        ring.close(unlink=True)


def _remove(path: Path) -> None:
    unlink_shared_file(path)  # first: see `SegmentRing.publish`
    for marker in marker_files(path):
        remove_shared(marker)


def _origin(path: Path) -> str | None:
    """Of the run that a ring belongs to; `None` if it does not say."""
    try:
        descriptor = open_shared(path)
    except OSError:
        return None
    try:
        with open(descriptor, "rb", closefd=False) as file:
            page = file.read(RING_HEADER_NBYTES)
            return read_header(page, file.seek(0, 2), str(path)).origin
    except Corrupt:
        return None
    finally:
        close_shared(descriptor)
