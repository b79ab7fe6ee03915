"""Hold segments in host memory: a ring of slots in named shared memory, with rules for the use of slots.

A slot is free, being filled, or sealed. A *generation* owns the slots of its segments and plays roles:

* *snapshot*: its window is open; slots are acquired, filled and sealed.
* *persist*: pinned by a reader; its sealed segments may be read while the window is still open.
* *recovery*: complete, and fewer than `keep` newer generations are complete on all ranks.

::

    begin_window -> acquire, seal, ... -> finish_window -> publish -> `keep` newer ones are complete everywhere -> slots
    FREE
                                      |               `-> give_up: some rank has not published it ---------> slots FREE
                                      `-> abort_window ----------------------------------------------------> slots FREE

Invariants: a slot belongs to one generation at most; a pinned generation keeps its slots; a complete generation keeps
its slots until `keep` newer ones, usually one, are complete on all ranks, or until some rank has given it up. A slow
reader therefore costs slots, never bytes that are still needed. If no slot is left, `acquire` raises `RingFull`, and
the session skips the window.

A generation takes a block of slots, and each segment as many of them as it needs; a slot is a page. Behind them are small slots: for differences; or,
where generations have only some experts, for experts of replaced generations (`_ring_state`).

A generation is *published* by a marker: a small file beside the ring with its slots and all digests. The file appears
whole and last, and goes before any of its slots may be filled again: while the file is there, the bytes are. A
restarted process can therefore `adopt` a dead process's ring with all published generations (`FORMAT.md`, section 9).

Threads: all methods may be called from any thread; views may be used until their slot is freed.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Hashable, Sequence
from itertools import chain, filterfalse
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.errors import Corrupt, RingFull
from lightning_moe_ckpt.process import ACCOUNT_NBYTES
from lightning_moe_ckpt.storage import RING_HEADER_NBYTES, GenerationId, MemoryMarker, RankMarker, RingHeader, SlotClass
from lightning_moe_ckpt.tiers._ring_state import (
    PAGE_NBYTES,
    ExpertCopies,
    Generation,
    GenerationState,
    Slot,
    read_header,
    read_statement,
)
from lightning_moe_ckpt.tiers._shm import (
    SharedFile,
    marker_files,
    marker_path,
    remove_shared,
    shared_directory,
    unfinished_path,
    write_shared,
)

log = rank_logger(__name__)


class SegmentRing(ExpertCopies):
    """Slots in a mapped file. Make a ring with `create` or `adopt`."""

    is_adopted = False
    """Whether an earlier process has made the ring, and written to its pages."""

    @classmethod
    def create(
        cls,
        name: str,
        slot_nbytes: int,
        num_slots: int,
        directory: Path | None = None,
        *,
        small: Sequence[SlotClass] = (),
        origin: str = "",
    ) -> SegmentRing:
        """Reserve and map memory; replaces an earlier process's ring under `name`, see `shared_name`. Raises like
        `expect_room`, and `ValueError` if a size is not positive.

        Slots for segments have bytes rounded up to whole pages; further, small ones have whole pages. The directory is
        by default as in `shared_directory`; `origin` is the digest of the run's URL.
        """
        if slot_nbytes <= 0 or num_slots <= 0:
            raise ValueError(
                f"`SegmentRing.create(slot_nbytes={slot_nbytes}, num_slots={num_slots})` must be positive."
            )
        slot_nbytes += -slot_nbytes % PAGE_NBYTES
        path = (directory if directory is not None else shared_directory()) / name
        header = RingHeader(
            nonce=uuid.uuid4().hex, slot_nbytes=slot_nbytes, num_slots=num_slots, small=tuple(small), origin=origin
        )
        for stale in marker_files(path):
            remove_shared(stale)
        file = SharedFile.create(path, header.nbytes)
        file.memory[:RING_HEADER_NBYTES] = torch.frombuffer(bytearray(header.to_bytes()), dtype=torch.uint8)
        log.info("ring %s: %s", path, size_text(header.nbytes))
        return cls(path, file.memory[RING_HEADER_NBYTES:], header, file)

    @classmethod
    def adopt(cls, path: Path) -> SegmentRing | None:
        """Take over a dead process's ring in place: its published generations are complete; `lay` says which slots are
        free. Returns the ring; `None` if the process that made the ring is alive, stopped or not. Raises
        `FileNotFoundError` if there is no ring; `Corrupt` if the file is not a ring.
        """
        if (file := SharedFile.take_over(path)) is None:
            return None
        try:
            # Not through the mapping: a page that its process did not come to reserve may have no room.
            header = read_header(os.pread(file.descriptor, RING_HEADER_NBYTES, 0), file.memory.numel(), str(path))
        except Corrupt:
            file.close(unlink=False)
            raise
        ring = cls(path, file.memory[RING_HEADER_NBYTES:], header, file)
        ring.lay(header.num_slots)  # one block: `make` divides the slots of a ring that it puts into use
        ring._restore_published()
        ring.is_adopted = True
        return ring

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one of a segment's slots, whole pages."""
        return self.header.slot_nbytes

    @property
    def num_slots(self) -> int:
        """Number of slots for segments."""
        return self.header.num_slots

    @property
    def nbytes(self) -> int:
        """File size in bytes."""
        return self.header.nbytes

    @property
    def memory(self) -> Tensor:
        """All slots as a uint8 tensor, e.g. to register with a device."""
        assert self._memory is not None, "the ring is closed"
        return self._memory

    @property
    def account(self) -> memoryview:
        """Last bytes of the header's page, the account of the process that owns the ring. Readers of the header pass them over."""
        assert self._file is not None
        page: Any = self._file.memory[RING_HEADER_NBYTES - ACCOUNT_NBYTES : RING_HEADER_NBYTES].numpy()
        return memoryview(page)

    @property
    def usage(self) -> str:
        """Text for messages: slots in use, by their generation's state."""
        with self._lock:
            return self._usage()

    @property
    def block(self) -> int:
        """Number of slots for a generation."""
        return self._slots.block

    @property
    def free_slots(self) -> int:
        """Number of free slots for segments."""
        with self._lock:
            return self._slots.free

    def free_small(self, nbytes: int) -> int:
        """Return the number of small slots for `nbytes` that can be acquired now."""
        with self._lock:
            return self._slots.free_small(nbytes)

    def can_begin(self, sizes: Sequence[int]) -> bool:
        """Return whether a window with segments of these bytes can begin.

        A block must be free now; further ones may be those of generations that go as soon as all ranks know that the newest
        complete generation is complete everywhere.
        """
        with self._lock:
            complete = [entry for entry in self._generations.values() if entry.state is GenerationState.COMPLETE]
            going = filterfalse(attrgetter("pins"), complete[: _first_kept(complete, self.keep)])
            return self._slots.fits(sizes, chain.from_iterable(map(attrgetter("slots"), going)))

    def fits(self, sizes: Sequence[int], *, link_nbytes: int = 0) -> bool:
        """Return whether windows with segments of these bytes fit here in a row, and differences as well."""
        slots = (1 + self.keep) * self._slots.blocks(sizes) * self._slots.block
        small = not link_nbytes or any(slot_class.nbytes >= link_nbytes for slot_class in self.header.small)
        return slots <= self.num_slots and small

    def lay(self, block: int) -> None:
        """Divide the slots into blocks for generations, see `SlotPool`; between windows."""
        with self._lock:
            self._slots.lay(block)

    # -- the window being filled

    def begin_window(self, generation: Hashable, *, is_link: bool = False) -> None:
        """Open a window of `generation`, in the snapshot role. Only one is open at a time, and a name is used once.
        `is_link`: the generation will be a difference to the generation before, and so of no use without it.
        """
        with self._lock:
            assert generation not in self._generations, f"{generation} was begun before"
            is_open = any(entry.state is GenerationState.OPEN for entry in self._generations.values())
            assert not is_open, "the window before is still open"
            self._generations[generation] = Generation(is_link=is_link)

    def acquire(self, generation: Hashable, step: int, nbytes: int = 0) -> Slot:
        """Return memory to fill for the segment of `step`, in the open window; one slot if 0 bytes are named. A
        difference gets a small slot. Raises `RingFull` if there is no room.
        """
        with self._lock:
            entry = self._entry(generation, GenerationState.OPEN)
            last = next(reversed(entry.slots), None)
            index = self._slots.take_small(nbytes) if entry.is_link else self._slots.take(nbytes or 1, last)
            if index is None:
                raise RingFull(
                    f"There is no room in memory for {size_text(nbytes)} ({self._usage()}); the capture of step {step} is "
                    "skipped. If this happens often, give `memory_generations=3`, or take generations less often."
                )
            entry.slots[index] = False
            entry.steps[step] = index
            return Slot(index, generation, step, self._view(index))

    def seal(self, slot: Slot) -> None:
        """Seal a slot: its bytes are there, or on their way by a ticket, and nothing else will be written."""
        with self._lock:
            entry = self._entry(slot.generation, GenerationState.OPEN)
            assert entry.slots.get(slot.index) is False, f"slot {slot.index} is not being filled"
            entry.slots[slot.index] = True

    def whole(self, generation: Hashable) -> None:
        """Note that the open window is no difference after all: the slots filled so far are free again."""
        with self._lock:
            entry = self._entry(generation, GenerationState.OPEN)
            entry.is_link = False
            self._slots.give_back(entry.slots)
            entry.slots, entry.steps = {}, {}

    def finish_window(self, generation: Hashable) -> None:
        """Close the window, with all segments sealed: the generation is complete on this rank."""
        with self._lock:
            entry = self._entry(generation, GenerationState.OPEN)
            assert entry.slots, f"{generation} has no segment"
            assert all(entry.slots.values()), f"a segment of {generation} is not sealed"
            entry.state = GenerationState.COMPLETE

    def abort_window(self, generation: Hashable) -> None:
        """Give up an open window. Wait for copies into its slots first; the last `unpin` frees pinned slots."""
        with self._lock:
            self._drop(generation, self._entry(generation, GenerationState.OPEN))

    # -- complete generations

    def publish(self, generation: GenerationId, marker: RankMarker) -> None:
        """Write the marker: all its segments are in their slots, with final bytes. From any thread. Raises
        `CheckpointError` if the generation was given up meanwhile, or the ring's name is gone; `OSError` if there is no
        room for the marker.
        """
        path = marker_path(self.path, generation)
        with self._lock:
            entry = self._published_entry(generation)
            slots = {segment.step: entry.steps[segment.step] for segment in marker.segments}
            assert all(entry.slots[index] for index in slots.values()), "a segment is not sealed"
        said = MemoryMarker(ring=self.header.nonce, slots=slots, marker=marker, seen=self.seen)
        temporary = unfinished_path(path)
        try:
            write_shared(temporary, *said.parts())
            with self._lock:
                entry = self._published_entry(generation)
                temporary.rename(path)
                entry.marker, entry.said = path, said if self.experts else None
                self._expect_name(generation)
        finally:
            remove_shared(temporary)

    def discard(self, generation: Hashable) -> None:
        """Drop a generation, complete or not: its marker goes at once, its slots with the last pin."""
        with self._lock:
            if (entry := self._generations.get(generation)) is not None:
                self._withdraw(entry)
                self._drop(generation, entry)

    def give_up(self, generation: Hashable) -> None:
        """Drop a complete generation once its readers are done: some rank will never hold it. Ignored if it is gone.

        Its marker stays until the last pin is gone: replicas of other ranks' parts may still complete the generation.
        """
        with self._lock:
            entry = self._generations.get(generation)
            if entry is not None and entry.state is GenerationState.COMPLETE:
                self._drop(generation, entry)

    @property
    def complete(self) -> list[Hashable]:
        """Complete generations, oldest first."""
        with self._lock:
            return [name for name, entry in self._generations.items() if entry.state is GenerationState.COMPLETE]

    @property
    def published(self) -> list[GenerationId]:
        """Generations that a restarted process would find, oldest first."""
        with self._lock:
            held = [name for name, entry in self._generations.items() if entry.marker is not None]
        return [name for name in held if isinstance(name, GenerationId)]

    @property
    def markers(self) -> list[RankMarker]:
        """Markers that a restarted process would find, oldest first, read from their files."""
        with self._lock:
            paths = [entry.marker for entry in self._generations.values() if entry.marker is not None]
        return [found.marker for path in paths if (found := read_statement(path)) is not None]

    def view(self, generation: GenerationId, step: int) -> Tensor | None:
        """Return a published generation's slot, or `None`. The caller pins it, or knows that nothing drops it."""
        with self._lock:
            entry = self._generations.get(generation)
            index = entry.steps.get(step) if entry is not None and entry.marker is not None else None
            return None if index is None else self._view(index)

    def complete_everywhere(self, generation: Hashable) -> None:
        """Drop all but the `keep` newest generations up to `generation`, which is complete on all ranks; experts may
        stay.

        Differences stay as long as their base. Repeating this is allowed.
        """
        with self._lock:
            self._entry(generation, GenerationState.COMPLETE).everywhere = True
            names = list(self._generations)
            settled = names[: names.index(generation) + 1]
            complete = [each for each in settled if self._generations[each].state is GenerationState.COMPLETE]
            first = _first_kept([self._generations[each] for each in complete], self.keep)
            for older in settled:
                entry = self._generations[older]
                if older in complete[first:] or entry.state in (GenerationState.RETIRED, GenerationState.EXPERTS):
                    continue
                if self.experts and entry.is_whole and entry.state is GenerationState.COMPLETE:
                    entry.state = GenerationState.RETIRED
                else:
                    self._drop(older, entry)
            retired = any(entry.is_free_to_go for entry in self._generations.values())
        if retired:
            self.on_retired()

    def make_room(self, nbytes: int, stored: GenerationId | None) -> None:
        """Drop the oldest differences until a small slot is free for the next one, but only those up to `stored`, the
        newest generation that storage has, on all ranks, together with all before it in its chain.
        """
        with self._lock:
            links = [(name, entry) for name, entry in self._generations.items() if entry.is_link and entry.pins == 0]
            for name, entry in links:
                if self._slots.free_small(nbytes) or stored is None:
                    return
                if entry.state is GenerationState.COMPLETE and isinstance(name, GenerationId) and name <= stored:
                    self._drop(name, entry)

    @property
    def holds_all(self) -> bool:
        """Whether a restarted process would find here all that it needs besides storage."""
        with self._lock:
            entries = self._generations.values()
            if self.experts:
                return self.experts.keys() <= {operator for entry in entries for operator in entry.experts}
            return sum(e.state is GenerationState.COMPLETE and not e.is_link for e in entries) >= self.keep

    def pin(self, generation: Hashable) -> None:
        """Keep the slots of an open or complete generation until `unpin`; pins are counted."""
        with self._lock:
            self._entry(generation, GenerationState.OPEN, GenerationState.COMPLETE).pins += 1

    def unpin(self, generation: Hashable) -> None:
        """Remove a pin; the last pin frees the slots if the generation was dropped meanwhile."""
        with self._lock:
            entry = self._generations[generation]
            assert entry.pins > 0, f"{generation} is not pinned"
            entry.pins -= 1
            if entry.state is GenerationState.DROPPED:
                self._drop(generation, entry)
            retired = entry.is_free_to_go
        if retired:
            self.on_retired()

    # -- the end

    def close(self, *, unlink: bool = True) -> None:
        """Release the memory, which is unmapped with its last view, and with `unlink` remove the names too, if this
        process made or adopted the ring. A forked child never does. Closing twice is allowed.
        """
        self._memory = None
        if self._file is not None:
            if unlink:
                self.unlink()
            self._file.close(unlink=unlink)

    def unlink(self) -> None:
        """Remove the names without logging or waiting for a lock: for a process's last moment."""
        if self._file is not None and self._file.is_mine():
            self._unlinked = True  # before looking for markers: see `_expect_name`
            for path in (*marker_files(self.path), self.path):
                remove_shared(path)


def _first_kept(complete: Sequence[Generation], keep: int) -> int:
    """Return the index of the first generation that stays if `keep` whole ones stay, with their differences."""
    for index in range(len(complete) - 1, -1, -1):
        keep -= not complete[index].is_link
        if keep == 0:
            return index
    return 0
