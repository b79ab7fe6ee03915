"""What a ring knows: which generation has which slots, and which of them a later process would find."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_moe_ckpt.errors import CheckpointError, Corrupt
from lightning_moe_ckpt.storage import ExpertSlot, GenerationId, MemoryMarker, RingHeader
from lightning_moe_ckpt.tiers._sealed import is_differential
from lightning_moe_ckpt.tiers._shm import (
    SharedFile,
    marker_files,
    marker_paths,
    read_shared,
    remove_shared,
    withdraw_shared,
)
from lightning_moe_ckpt.tiers._slots import SlotPool


class GenerationState(Enum):
    """State of a generation's window."""

    OPEN = "open"
    COMPLETE = "complete"
    RETIRED = "retired"
    """Newer ones replace all but its experts, which are still to be brought to slots of their own."""
    EXPERTS = "experts"
    """Of it there are some experts."""
    DROPPED = "dropped"
    """Aborted or superseded; kept only until the last pin is gone."""


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """Memory of one segment, which belongs to a generation until that is freed."""

    index: int
    generation: Hashable
    step: int
    view: Tensor
    """uint8, all bytes of the slot, starts on a page."""


@dataclass(slots=True)
class Generation:
    """What a ring knows of a generation."""

    state: GenerationState = GenerationState.OPEN
    slots: dict[int, bool] = field(default_factory=dict)
    """Its slots by index, and whether they are sealed."""
    steps: dict[int, int] = field(default_factory=dict)
    """Index of the slot, by step."""
    pins: int = 0
    everywhere: bool = False
    """Whether all ranks have said that they have theirs."""
    marker: Path | None = None
    """Path of the marker; `None` until the generation is published."""
    is_link: bool = False
    """Whether it is a difference to the generation before."""
    said: MemoryMarker | None = None
    """What its marker says, where that is needed again."""
    experts: dict[str, ExpertSlot] = field(default_factory=dict)
    """What is left of it, by operator."""

    @property
    def is_whole(self) -> bool:
        """Whether a process could resume from it."""
        return self.marker is not None and bool(self.slots)

    @property
    def is_free_to_go(self) -> bool:
        """Whether its experts can be brought to slots of their own."""
        return self.state is GenerationState.RETIRED and self.pins == 0


class RingState:
    """State of a ring. Methods are called with the lock held; without a header all memory is slots of `slot_nbytes`."""

    def __init__(
        self,
        path: Path,
        memory: Tensor,
        slot_nbytes: int,
        *,
        file: SharedFile | None = None,
        header: RingHeader | None = None,
    ) -> None:
        self.path, self._file = path, file
        self.header = header or RingHeader(
            nonce="", slot_nbytes=slot_nbytes, num_slots=memory.numel() // slot_nbytes, origin=""
        )
        """Says which slots there are."""
        self._memory: Tensor | None = memory
        self._lock = threading.Lock()
        self._unlinked = False
        self._slots = SlotPool(self.header)
        self.experts: Mapping[str, int] = {}
        """Operators of which the newest copy stays, with their bytes; of generations that have them all, empty."""
        self.on_retired: Callable[[], None] = lambda: None
        """Called when `condense` has something to do, from any thread."""
        self._views: dict[int, Tensor] = {}
        """Memory of slots that have been in use, by index."""
        self._generations: dict[Any, Generation] = {}  # in the order in which their windows began
        self.keep = 1
        """Number of newest generations that stay once they are complete on all ranks."""
        self.seen: GenerationId | None = None
        """Newest known commit, which later published markers state."""

    @property
    def is_named(self) -> bool:
        """Return whether a restarted process would find the ring; another process may have removed its name."""
        return self._file is None or self._file.is_mine()

    def _entry(self, generation: Hashable, *states: GenerationState) -> Generation:
        entry = self._generations.get(generation)
        assert entry is not None, f"{generation} is not in the ring"
        assert entry.state in states, f"{generation} is {entry.state.value}"
        return entry

    def _published_entry(self, generation: Hashable) -> Generation:
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

    def _view(self, index: int) -> Tensor:
        start, nbytes = self.header.extent(index)
        assert self._memory is not None, "the ring is closed"
        return self._memory[start : start + nbytes]

    def _withdraw(self, entry: Generation) -> None:
        if entry.marker is not None:
            withdraw_shared(entry.marker)
            entry.marker = None

    def _restore_published(self) -> None:
        found = [(path, read_statement(path)) for path in marker_paths(self.path)]
        good = [(path, marker) for path, marker in found if marker is not None and self._holds(marker)]
        taken: set[int] = set()
        restored: dict[GenerationId, Generation] = {}
        for path, said in sorted(good, key=lambda each: each[1].marker.generation, reverse=True):
            slots = {*said.slots.values(), *(each.slot for each in said.experts)}
            if taken.isdisjoint(slots):
                taken |= slots
                restored[said.marker.generation] = Generation(
                    state=GenerationState.EXPERTS if said.experts else GenerationState.COMPLETE,
                    slots=dict.fromkeys(said.slots.values(), True),
                    steps=dict(said.slots),
                    is_link=is_differential(said.marker.policy),
                    experts={each.operator: each for each in said.experts},
                    marker=path,
                )
        self._generations = {name: restored[name] for name in sorted(restored)}
        self._slots.claim(taken)
        kept = {entry.marker for entry in restored.values()}
        for path in marker_files(self.path):
            if path not in kept:
                remove_shared(path)

    def _holds(self, said: MemoryMarker) -> bool:
        try:
            places = said.places(self.header)
        except LookupError:
            return False
        whole = all([(0, entry.nbytes)] == [each[:2] for each in places[entry.key]] for entry in said.marker.segments)
        return said.ring == self.header.nonce and bool(places) and (whole or bool(said.experts))

    def _drop(self, generation: Hashable, entry: Generation) -> None:
        entry.state = GenerationState.DROPPED
        if entry.pins == 0:
            self._withdraw(entry)  # before a slot can be filled again
            self._slots.give_back([*entry.slots, *(each.slot for each in entry.experts.values())])
            del self._generations[generation]

    def _usage(self) -> str:
        counts = Counter[str]()
        for entry in self._generations.values():
            if entry.slots:
                counts[f"{entry.state.value}{' and pinned' if entry.pins else ''}"] += len(entry.slots)
        return ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))


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
