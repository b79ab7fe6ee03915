"""Host memory for segments: a ring of equal slots in named shared memory, and the rules of who may use which slot.

A slot is FREE, FILLING or SEALED. A *generation* owns the slots its segments were captured into and plays roles:

* *snapshot*: its window is open; slots are acquired, filled and sealed.
* *persist*: pinned by somebody who reads it; its sealed segments may travel while the window is still open.
* *recovery*: complete, and no newer one is complete on all ranks.

::

    begin_window -> acquire, seal, ... -> finish_window -> a newer one is complete everywhere -> slots FREE
                                      `-> abort_window -----------------------------------------> slots FREE

Invariants: a slot belongs to one generation at most; a pinned generation keeps its slots; a complete generation keeps
its slots until a newer one is complete on all ranks. So a slow reader costs slots, never somebody's bytes. When no
slot is left `acquire` raises `RingFull`, and the session skips the window.

Threads: all methods may be called from any thread; views may be used until their slot is freed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from torch import Tensor

from lightning_moe_ckpt.errors import RingFull
from lightning_moe_ckpt.tiers._shm import create_shared_file, map_shared_file, shared_directory, unlink_shared_file

log = logging.getLogger(__name__)

_PAGE_NBYTES = 4096


class SlotState(Enum):
    """What may happen to a slot next."""

    FREE = "free"
    FILLING = "filling"
    SEALED = "sealed"


class GenerationState(Enum):
    """How far the window of a generation got."""

    OPEN = "open"
    COMPLETE = "complete"
    DROPPED = "dropped"
    """Aborted or superseded; kept only until the last pin is gone."""


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """The memory of one segment, on loan to a generation until that is freed."""

    index: int
    generation: Hashable
    step: int
    view: Tensor
    """uint8, shape `[slot_nbytes]`, starts on a page."""


@dataclass(slots=True)
class _Generation:
    state: GenerationState = GenerationState.OPEN
    slots: dict[int, SlotState] = field(default_factory=dict)
    pins: int = 0


def slots_needed(window: int, lag: int) -> int:
    """Slots for windows of `window` segments.

    One complete generation is kept while the next is filled, and `lag` further slots are filled before all ranks know
    that the newer one is complete, or while storage still reads the older one.
    """
    return 2 * window + lag


class SegmentRing:
    """Equal slots in one mapped file. Make one with `create`."""

    def __init__(self, path: Path, memory: Tensor, slot_nbytes: int) -> None:
        self.path = path
        self.slot_nbytes = slot_nbytes
        """Bytes per slot, whole pages."""
        self.num_slots = memory.numel() // slot_nbytes
        self._memory: Tensor | None = memory
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._free = list(range(self.num_slots))
        self._generations: dict[Hashable, _Generation] = {}  # in the order in which their windows began

    @classmethod
    def create(cls, name: str, slot_nbytes: int, num_slots: int, directory: Path | None = None) -> SegmentRing:
        """Reserve and map memory; replaces the ring that an earlier life left under `name`.

        Args:
            name: see `shared_name`.
            slot_nbytes: bytes of the largest segment; rounded up to whole pages.
            num_slots: see `slots_needed`.
            directory: where the file goes; default `/dev/shm`.

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
        create_shared_file(path, slot_nbytes * num_slots)
        log.info("ring %s: %d segments of %.1f MiB", path, num_slots, slot_nbytes / 2**20)
        return cls(path, map_shared_file(path), slot_nbytes)

    @property
    def memory(self) -> Tensor:
        """All slots as one uint8 tensor, e.g. to register it with a device."""
        assert self._memory is not None, "the ring is closed"
        return self._memory

    @property
    def free_slots(self) -> int:
        """Slots that can be acquired now."""
        with self._lock:
            return len(self._free)

    def has_room(self, num_slots: int) -> bool:
        """Whether that many slots can be acquired now."""
        return self.free_slots >= num_slots

    def fits(self, slot_nbytes: int, window: int) -> bool:
        """Whether windows of `window` segments of `slot_nbytes` can follow each other in this memory."""
        return slot_nbytes <= self.slot_nbytes and slots_needed(window, lag=0) <= self.num_slots

    # -- the window being filled

    def begin_window(self, generation: Hashable) -> None:
        """Open a window; it takes the snapshot role. One is open at a time, and a name is used once."""
        with self._lock:
            assert generation not in self._generations, f"{generation} was begun before"
            assert self._open_window() is None, "the window before is still open"
            self._generations[generation] = _Generation()

    def acquire(self, generation: Hashable, step: int) -> Slot:
        """A slot to fill for the segment of `step`.

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
            # First in, first out: windows of equal length then find each slot of the plan in the same place again.
            index = self._free.pop(0)
            entry.slots[index] = SlotState.FILLING
        start = index * self.slot_nbytes
        return Slot(index, generation, step, self.memory[start : start + self.slot_nbytes])

    def seal(self, slot: Slot) -> None:
        """All bytes of the segment are there, or on their way by a ticket; nothing else will be written."""
        with self._lock:
            entry = self._entry(slot.generation, GenerationState.OPEN)
            assert entry.slots.get(slot.index) is SlotState.FILLING, f"slot {slot.index} is not being filled"
            entry.slots[slot.index] = SlotState.SEALED

    def finish_window(self, generation: Hashable) -> None:
        """Every segment of the window is sealed: the generation is complete on this rank."""
        with self._lock:
            entry = self._entry(generation, GenerationState.OPEN)
            assert entry.slots, f"{generation} has no segment"
            assert SlotState.FILLING not in entry.slots.values(), f"a segment of {generation} is not sealed"
            entry.state = GenerationState.COMPLETE

    def abort_window(self, generation: Hashable) -> None:
        """Give up an open window. Wait for copies into its slots first; pinned slots are freed by the last `unpin`."""
        with self._lock:
            self._drop(generation, self._entry(generation, GenerationState.OPEN))

    # -- complete generations

    def complete_everywhere(self, generation: Hashable) -> None:
        """All ranks have completed `generation`: nobody will fall back to an older one. Repeating this is allowed."""
        with self._lock:
            self._entry(generation, GenerationState.COMPLETE)
            names = list(self._generations)
            for older in names[: names.index(generation)]:
                self._drop(older, self._generations[older])

    def discard(self, generation: Hashable) -> None:
        """Give up a complete generation though no newer one took its place."""
        with self._lock:
            self._drop(generation, self._entry(generation, GenerationState.COMPLETE))

    def pin(self, generation: Hashable) -> None:
        """Keep the slots of an open or complete generation until `unpin`; pins are counted."""
        with self._lock:
            self._entry(generation, GenerationState.OPEN, GenerationState.COMPLETE).pins += 1

    def unpin(self, generation: Hashable) -> None:
        """Take one pin back; frees the slots if the generation was dropped meanwhile."""
        with self._lock:
            entry = self._generations[generation]
            assert entry.pins > 0, f"{generation} is not pinned"
            entry.pins -= 1
            if entry.state is GenerationState.DROPPED:
                self._drop(generation, entry)

    # -- the end

    def close(self, *, unlink: bool = True) -> None:
        """Let go of the memory; it is unmapped with the last view of it. Closing twice is allowed.

        Args:
            unlink: remove the name too, if this process made it. A forked child never does.
        """
        self._memory = None
        if unlink and self._pid == os.getpid():
            unlink_shared_file(self.path)

    # -- private; the lock is held

    def _entry(self, generation: Hashable, *states: GenerationState) -> _Generation:
        entry = self._generations.get(generation)
        assert entry is not None, f"{generation} is not in the ring"
        assert entry.state in states, f"{generation} is {entry.state.value}"
        return entry

    def _open_window(self) -> Hashable | None:
        return next((g for g, e in self._generations.items() if e.state is GenerationState.OPEN), None)

    def _drop(self, generation: Hashable, entry: _Generation) -> None:
        entry.state = GenerationState.DROPPED
        if entry.pins == 0:
            self._free.extend(entry.slots)
            del self._generations[generation]

    def _usage(self) -> str:
        counts = Counter[str]()
        for entry in self._generations.values():
            counts[f"{entry.state.value}{' and pinned' if entry.pins else ''}"] += len(entry.slots)
        return ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))
