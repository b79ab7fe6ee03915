"""Hold segments in host memory: a ring of equal slots in named shared memory, with rules for the use of slots.

A slot is free, being filled, or sealed. A *generation* owns the slots of its segments and plays roles:

* *snapshot*: its window is open; slots are acquired, filled and sealed.
* *persist*: pinned by a reader; its sealed segments may be read while the window is still open.
* *recovery*: complete, and fewer than `keep` newer ones are complete on all ranks.

::

    begin_window -> acquire, seal, ... -> finish_window -> publish -> `keep` newer ones are complete everywhere -> slots FREE
                                      |               `-> give_up: some rank has not published it ---------> slots FREE
                                      `-> abort_window ----------------------------------------------------> slots FREE

Invariants: a slot belongs to one generation at most; a pinned generation keeps its slots; a complete generation keeps
its slots until `keep` newer ones, usually one, are complete on all ranks, or until some rank has given it up. A slow
reader therefore costs slots, never bytes that are still needed. If no slot is left, `acquire` raises `RingFull`, and the
session skips the window.

A generation is *published* by a marker: a small file beside the ring with its slots and all digests. The file
appears whole and last, and goes before one of its slots may be filled again: while it is there, the bytes are. A
restarted process can therefore `adopt` the ring of a dead one with all published generations (`FORMAT.md`, section 9).

Threads: all methods may be called from any thread; views may be used until their slot is freed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from lightning_moe_ckpt.errors import CheckpointError, Corrupt, RingFull
from lightning_moe_ckpt.storage import RING_HEADER_NBYTES, GenerationId, MemoryMarker, RankMarker, RingHeader
from lightning_moe_ckpt.tiers._shm import (
    SharedFile,
    marker_files,
    marker_path,
    marker_paths,
    read_shared,
    remove_shared,
    shared_directory,
    unfinished_path,
    withdraw_shared,
    write_shared,
)

log = logging.getLogger(__name__)

_PAGE_NBYTES = 4096


class GenerationState(Enum):
    """State of a generation's window."""

    OPEN = "open"
    COMPLETE = "complete"
    DROPPED = "dropped"
    """Aborted or superseded; kept only until the last pin is gone."""


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """Memory of one segment, which belongs to a generation until that is freed."""

    index: int
    generation: Hashable
    step: int
    view: Tensor
    """uint8, shape `[slot_nbytes]`, starts on a page."""


@dataclass(slots=True)
class _Generation:
    state: GenerationState = GenerationState.OPEN
    slots: dict[int, bool] = field(default_factory=dict)
    """Its slots by index, and whether they are sealed."""
    steps: dict[int, int] = field(default_factory=dict)
    """Index of the slot, by step."""
    pins: int = 0
    marker: Path | None = None
    """Path of the marker; `None` until the generation is published."""
    is_link: bool = False
    """Whether it is a difference to the generation before."""


def slots_needed(window: int, *, readers: int = 0, lag: int = 0, keep: int = 1) -> int:
    """Return the number of slots for windows of `window` segments.

    Args:
        window: segments per window; `keep` complete generations stay while the next one is filled.
        readers: tiers that may each still be reading a generation older than that.
        lag: slots that may be filled before all ranks know that the newer one is complete.
        keep: number of generations to keep that are complete on all ranks.
    """
    return (1 + keep + readers) * window + lag


class SegmentRing:
    """Equal slots in one mapped file. Make one with `create` or `adopt`."""

    def __init__(
        self, path: Path, memory: Tensor, slot_nbytes: int, *, file: SharedFile | None = None, nonce: str = ""
    ) -> None:
        self.path, self._file, self._nonce = path, file, nonce
        self.slot_nbytes = slot_nbytes
        """Bytes per slot, whole pages."""
        self.num_slots = memory.numel() // slot_nbytes
        self._memory: Tensor | None = memory
        self._lock = threading.Lock()
        self._unlinked = False
        self._free = list(range(self.num_slots))
        self._views: dict[int, Tensor] = {}
        """Memory of slots that have been in use, by index."""
        self._generations: dict[Hashable, _Generation] = {}  # in the order in which their windows began
        self.keep = 1
        """Number of newest generations that stay once they are complete on all ranks."""
        self.seen: GenerationId | None = None
        """Newest known commit, which later published markers state."""

    @classmethod
    def create(
        cls, name: str, slot_nbytes: int, num_slots: int, directory: Path | None = None, *, origin: str = ""
    ) -> SegmentRing:
        """Reserve and map memory; replaces the ring that an earlier process left under `name`.

        Args:
            name: see `shared_name`.
            slot_nbytes: bytes of the largest segment; rounded up to whole pages.
            num_slots: see `slots_needed`.
            directory: where the file goes; default `/dev/shm`.
            origin: digest of the run's URL.

        Raises:
            ConfigurationError: not enough room; the message says how many bytes are missing.
            ValueError: a size is not positive.
        """
        if slot_nbytes <= 0 or num_slots <= 0:
            raise ValueError(
                f"`SegmentRing.create(slot_nbytes={slot_nbytes}, num_slots={num_slots})` must be positive."
            )
        slot_nbytes += -slot_nbytes % _PAGE_NBYTES
        path = (directory if directory is not None else shared_directory()) / name
        header = RingHeader(nonce=uuid.uuid4().hex, slot_nbytes=slot_nbytes, num_slots=num_slots, origin=origin)
        for stale in marker_files(path):
            remove_shared(stale)
        file = SharedFile.create(path, header.nbytes)
        file.memory[:RING_HEADER_NBYTES] = torch.frombuffer(bytearray(header.to_bytes()), dtype=torch.uint8)
        log.info("ring %s: %d segments of %.1f MiB", path, num_slots, slot_nbytes / 2**20)
        return cls(path, file.memory[RING_HEADER_NBYTES:], slot_nbytes, file=file, nonce=header.nonce)

    @classmethod
    def adopt(cls, path: Path) -> SegmentRing | None:
        """Take over the ring of a dead process in place: its published generations are complete, other slots are free.

        Returns:
            The ring; `None` if the process that made it is alive, stopped or not.

        Raises:
            FileNotFoundError: there is no ring.
            Corrupt: the file is not a ring.
        """
        file = SharedFile.take_over(path)
        if file is None:
            return None
        try:
            header = read_header(bytes(file.memory[:RING_HEADER_NBYTES].numpy()), file.memory.numel(), str(path))
        except Corrupt:
            file.close(unlink=False)
            raise
        ring = cls(path, file.memory[RING_HEADER_NBYTES:], header.slot_nbytes, file=file, nonce=header.nonce)
        ring._restore_published()
        return ring

    @property
    def nbytes(self) -> int:
        """Return the bytes of the file."""
        return RING_HEADER_NBYTES + self.num_slots * self.slot_nbytes

    @property
    def memory(self) -> Tensor:
        """Return all slots as one uint8 tensor, e.g. to register it with a device."""
        assert self._memory is not None, "the ring is closed"
        return self._memory

    @property
    def is_named(self) -> bool:
        """Return whether a restarted process would find the ring; another process may have removed its name."""
        return self._file is None or self._file.is_mine()

    @property
    def usage(self) -> str:
        """Return a text for messages that says what takes slots."""
        with self._lock:
            return self._usage()

    @property
    def free_slots(self) -> int:
        """Return the number of slots that can be acquired now."""
        with self._lock:
            return len(self._free)

    def can_begin(self, window: int) -> bool:
        """Return whether a window of so many segments can begin.

        One slot must be free; the others may still belong to generations that go as soon as all ranks know that the
        newest complete one is complete everywhere.
        """
        with self._lock:
            complete = [entry for entry in self._generations.values() if entry.state is GenerationState.COMPLETE]
            going = sum(len(entry.slots) for entry in complete[: _first_kept(complete, self.keep)] if entry.pins == 0)
            return bool(self._free) and len(self._free) + going >= window

    def fits(self, slot_nbytes: int, window: int) -> bool:
        """Return whether windows of `window` segments of `slot_nbytes` can follow each other in this memory."""
        return slot_nbytes <= self.slot_nbytes and slots_needed(window, keep=self.keep) <= self.num_slots

    # -- the window being filled

    def begin_window(self, generation: Hashable, *, is_link: bool = False) -> None:
        """Open a window; it takes the snapshot role. One is open at a time, and a name is used once.

        Args:
            generation: its name.
            is_link: whether it will be a difference to the generation before, and so of no use without that.
        """
        with self._lock:
            assert generation not in self._generations, f"{generation} was begun before"
            is_open = any(entry.state is GenerationState.OPEN for entry in self._generations.values())
            assert not is_open, "the window before is still open"
            self._generations[generation] = _Generation(is_link=is_link)

    def acquire(self, generation: Hashable, step: int) -> Slot:
        """Return a slot to fill for the segment of `step`.

        Args:
            generation: whose segment it is.
            step: its boundary.

        Raises:
            RingFull: every slot is in use.
        """
        with self._lock:
            entry = self._entry(generation, GenerationState.OPEN)
            if not self._free:
                raise RingFull(
                    f"All {self.num_slots} segment slots are in use ({self._usage()}); the capture of step {step} is "
                    "skipped. Raise `max_window` or free memory if this happens often."
                )
            # First in, first out: windows of equal length then find each step of the plan in the same place again.
            index = self._free.pop(0)
            entry.slots[index] = False
            entry.steps[step] = index
        view = self._views.get(index)
        if view is None:
            start = index * self.slot_nbytes
            view = self._views[index] = self.memory[start : start + self.slot_nbytes]
        return Slot(index, generation, step, view)

    def seal(self, slot: Slot) -> None:
        """Seal a slot: its bytes are there, or on their way by a ticket, and nothing else will be written."""
        with self._lock:
            entry = self._entry(slot.generation, GenerationState.OPEN)
            assert entry.slots.get(slot.index) is False, f"slot {slot.index} is not being filled"
            entry.slots[slot.index] = True

    def whole(self, generation: Hashable) -> None:
        """Note that the open window is no difference after all."""
        with self._lock:
            self._entry(generation, GenerationState.OPEN).is_link = False

    def finish_window(self, generation: Hashable) -> None:
        """Close the window, all of whose segments are sealed: the generation is complete on this rank."""
        with self._lock:
            entry = self._entry(generation, GenerationState.OPEN)
            assert entry.slots, f"{generation} has no segment"
            assert all(entry.slots.values()), f"a segment of {generation} is not sealed"
            entry.state = GenerationState.COMPLETE

    def abort_window(self, generation: Hashable) -> None:
        """Give up an open window. Wait for copies into its slots first; pinned slots are freed by the last `unpin`."""
        with self._lock:
            self._drop(generation, self._entry(generation, GenerationState.OPEN))

    # -- complete generations

    def publish(self, generation: GenerationId, marker: RankMarker) -> None:
        """Write the marker: all its segments are in their slots, with final bytes. From any thread.

        Raises:
            CheckpointError: the generation was given up meanwhile, or a later process has removed the ring's name.
            OSError: there is no room for the marker.
        """
        path = marker_path(self.path, generation)
        with self._lock:
            entry = self._published_entry(generation)
            slots = {segment.step: entry.steps[segment.step] for segment in marker.segments}
            assert all(entry.slots[index] for index in slots.values()), "a segment is not sealed"
        data = MemoryMarker(ring=self._nonce, slots=slots, marker=marker, seen=self.seen).parts()
        temporary = unfinished_path(path)
        try:
            write_shared(temporary, *data)
            with self._lock:
                entry = self._published_entry(generation)
                temporary.rename(path)
                entry.marker = path
                self._expect_name(generation)
        finally:
            remove_shared(temporary)

    def discard(self, generation: Hashable) -> None:
        """Drop a generation, complete or not: its marker goes at once, its slots with the last pin."""
        with self._lock:
            entry = self._generations.get(generation)
            if entry is not None:
                self._withdraw(entry)
                self._drop(generation, entry)

    def give_up(self, generation: Hashable) -> None:
        """Drop a complete generation once its readers are done, since some rank will never hold it. Ignored if it is gone.

        Its marker stays until the last pin is gone: the generation may still be completed by replicas of other ranks' parts.
        """
        with self._lock:
            entry = self._generations.get(generation)
            if entry is not None and entry.state is GenerationState.COMPLETE:
                self._drop(generation, entry)

    @property
    def complete(self) -> list[Hashable]:
        """Return the complete generations, oldest first."""
        with self._lock:
            return [name for name, entry in self._generations.items() if entry.state is GenerationState.COMPLETE]

    @property
    def published(self) -> list[GenerationId]:
        """Return the generations that a restarted process would find, oldest first."""
        with self._lock:
            held = [name for name, entry in self._generations.items() if entry.marker is not None]
        return [name for name in held if isinstance(name, GenerationId)]

    @property
    def markers(self) -> list[RankMarker]:
        """Return the markers that a restarted process would find, oldest first, read from their files."""
        with self._lock:
            paths = [entry.marker for entry in self._generations.values() if entry.marker is not None]
        return [found.marker for path in paths if (found := read_statement(path)) is not None]

    def view(self, generation: GenerationId, step: int) -> Tensor | None:
        """Return the slot of a published generation, or `None`. The caller pins it, or knows that nothing gives it up."""
        with self._lock:
            entry = self._generations.get(generation)
            index = entry.steps.get(step) if entry is not None and entry.marker is not None else None
        return None if index is None else self.memory[index * self.slot_nbytes : (index + 1) * self.slot_nbytes]

    def complete_everywhere(self, generation: Hashable) -> None:
        """Drop all but the `keep` newest generations up to `generation`, which is complete on all ranks.

        Of generations that are differences, those stay that follow on what stays. Repeating this is allowed.
        """
        with self._lock:
            self._entry(generation, GenerationState.COMPLETE)
            names = list(self._generations)
            settled = names[: names.index(generation) + 1]
            complete = [each for each in settled if self._generations[each].state is GenerationState.COMPLETE]
            first = _first_kept([self._generations[each] for each in complete], self.keep)
            for older in settled:
                if older not in complete[first:]:
                    self._drop(older, self._generations[older])

    def make_room(self, num_slots: int, stored: GenerationId | None) -> None:
        """Drop the oldest differences until so many slots are free, as far as all ranks have them in storage too.

        Args:
            num_slots: free slots that are wanted.
            stored: newest generation that storage has with all that it follows on.
        """
        with self._lock:
            links = [(name, entry) for name, entry in self._generations.items() if entry.is_link and entry.pins == 0]
            for name, entry in links:
                if len(self._free) >= num_slots or stored is None:
                    return
                if entry.state is GenerationState.COMPLETE and isinstance(name, GenerationId) and name <= stored:
                    self._drop(name, entry)

    @property
    def holds_all(self) -> bool:
        """Return whether a restarted process would find here whatever it needs beside storage."""
        with self._lock:
            entries = self._generations.values()
            return sum(e.state is GenerationState.COMPLETE and not e.is_link for e in entries) >= self.keep

    def pin(self, generation: Hashable) -> None:
        """Keep the slots of an open or complete generation until `unpin`; pins are counted."""
        with self._lock:
            self._entry(generation, GenerationState.OPEN, GenerationState.COMPLETE).pins += 1

    def unpin(self, generation: Hashable) -> None:
        """Remove one pin; the last one frees the slots if the generation was dropped meanwhile."""
        with self._lock:
            entry = self._generations[generation]
            assert entry.pins > 0, f"{generation} is not pinned"
            entry.pins -= 1
            if entry.state is GenerationState.DROPPED:
                self._drop(generation, entry)

    # -- the end

    def close(self, *, unlink: bool = True) -> None:
        """Release the memory, which is unmapped with its last view. Closing twice is allowed.

        Args:
            unlink: whether to remove the names too, if this process made or adopted the ring. A forked child never does.
        """
        self._memory = None
        self._views.clear()
        if self._file is not None:
            if unlink:
                self.unlink()
            self._file.close(unlink=unlink)

    def unlink(self) -> None:
        """Remove the names without logging or waiting for a lock: for the last moment of a process."""
        if self._file is not None and self._file.is_mine():
            self._unlinked = True  # before looking for markers: see `_expect_name`
            for path in (*marker_files(self.path), self.path):
                remove_shared(path)

    # -- private; the lock is held

    def _entry(self, generation: Hashable, *states: GenerationState) -> _Generation:
        entry = self._generations.get(generation)
        assert entry is not None, f"{generation} is not in the ring"
        assert entry.state in states, f"{generation} is {entry.state.value}"
        return entry

    def _published_entry(self, generation: Hashable) -> _Generation:
        entry = self._generations.get(generation)
        if entry is None or entry.state is GenerationState.DROPPED:
            raise CheckpointError(f"{generation} was given up, and is not in memory.")
        return entry

    def _expect_name(self, generation: GenerationId) -> None:
        """Raise, and remove the new marker, if the ring's name is gone: whoever removed the name has not seen that marker."""
        if self._unlinked or not self.is_named:
            self._withdraw(self._published_entry(generation))
            raise CheckpointError(
                f"{generation} is not in memory: this process, a later start of the run, or something that tidies up has removed "
                f"{self.path}."
            )

    def _withdraw(self, entry: _Generation) -> None:
        if entry.marker is not None:
            withdraw_shared(entry.marker)
            entry.marker = None

    def _restore_published(self) -> None:
        found = [(path, read_statement(path)) for path in marker_paths(self.path)]
        good = [(path, marker) for path, marker in found if marker is not None and self._holds(marker)]
        taken: set[int] = set()
        restored: dict[GenerationId, _Generation] = {}
        for path, marker in sorted(good, key=lambda each: each[1].marker.generation, reverse=True):
            if taken.isdisjoint(marker.slots.values()):
                taken.update(marker.slots.values())
                slots = dict.fromkeys(marker.slots.values(), True)
                restored[marker.marker.generation] = _Generation(
                    state=GenerationState.COMPLETE, slots=slots, steps=dict(marker.slots), marker=path
                )
        self._generations = {name: restored[name] for name in sorted(restored)}
        self._free = [index for index in self._free if index not in taken]
        kept = {entry.marker for entry in restored.values()}
        for path in marker_files(self.path):
            if path not in kept:
                remove_shared(path)

    def _holds(self, marker: MemoryMarker) -> bool:
        sizes = [marker.marker.slot_offset(segment) + segment.nbytes for segment in marker.marker.segments]
        indices = marker.slots.values()
        fits = all(nbytes <= self.slot_nbytes for nbytes in sizes) and all(index < self.num_slots for index in indices)
        return marker.ring == self._nonce and bool(sizes) and fits

    def _drop(self, generation: Hashable, entry: _Generation) -> None:
        entry.state = GenerationState.DROPPED
        if entry.pins == 0:
            self._withdraw(entry)  # before a slot can be filled again
            self._free.extend(entry.slots)
            del self._generations[generation]

    def _usage(self) -> str:
        counts = Counter[str]()
        for entry in self._generations.values():
            counts[f"{entry.state.value}{' and pinned' if entry.pins else ''}"] += len(entry.slots)
        return ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))


def _first_kept(complete: Sequence[_Generation], keep: int) -> int:
    """Return the place of the first generation that stays, if `keep` do and what follows on them."""
    for index in range(len(complete) - 1, -1, -1):
        keep -= not complete[index].is_link
        if keep == 0:
            return index
    return 0


def read_header(page: bytes, nbytes: int, where: str) -> RingHeader:
    """Parse the header of a ring whose file has `nbytes`. Raises `Corrupt`."""
    header = RingHeader.from_bytes(page, where)
    if header.nbytes != nbytes:
        raise Corrupt(f"{where}: has {nbytes} bytes, its header says {header.nbytes}. Another copy may be good.")
    return header


def read_statement(path: Path) -> MemoryMarker | None:
    """Read a marker beside a ring; `None` if it is not complete."""
    with contextlib.suppress(Corrupt, FileNotFoundError):
        return MemoryMarker.from_bytes(read_shared(path), str(path))
    return None
