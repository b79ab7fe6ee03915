"""Track which generation has which slots of a ring, and which slots a later process would find."""

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
    """Replaced by newer ones except for its experts, which still have to be brought to small slots."""
    EXPERTS = "experts"
    """Only some experts are left, in small slots."""
    DROPPED = "dropped"
    """Aborted or replaced; kept only until the last pin is gone."""


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """Memory of one segment; belongs to a generation until that generation is freed."""

    index: int
    generation: Hashable
    step: int
    view: Tensor
    """uint8, all bytes of the slot, starts on a page."""


@dataclass(slots=True)
class Generation:
    """State of a generation in a ring."""

    state: GenerationState = GenerationState.OPEN
    slots: dict[int, bool] = field(default_factory=dict)
    """Whether a slot is sealed, by slot index."""
    steps: dict[int, int] = field(default_factory=dict)
    """Slot index, by step."""
    pins: int = 0
    everywhere: bool = False
    """Whether the generation is complete on all ranks."""
    marker: Path | None = None
    """Path of the marker; `None` until the generation is published."""
    is_link: bool = False
    """Whether the generation is a difference to the generation before."""
    said: MemoryMarker | None = None
    """Contents of the marker, kept if needed again."""
    experts: dict[str, ExpertSlot] = field(default_factory=dict)
    """Experts left of the generation, by operator."""

    @property
    def is_whole(self) -> bool:
        """Whether a process could resume from the generation."""
        return self.marker is not None and bool(self.slots)

    @property
    def is_free_to_go(self) -> bool:
        """Whether its experts can be brought to small slots."""
        return self.state is GenerationState.RETIRED and self.pins == 0


class RingState:
    """State of a ring. Hooks that change it need the lock; without a header all slots have `slot_nbytes`."""

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
        """Number and sizes of the slots."""
        self._memory: Tensor | None = memory
        self._lock = threading.Lock()
        self._unlinked = False
        self._slots = SlotPool(self.header)
        self.experts: Mapping[str, int] = {}
        """Bytes of the operators whose newest copy stays, by name; empty where generations have all operators."""
        self.on_retired: Callable[[], None] = lambda: None
        """Called when `condense` has something to do, from any thread."""
        self._views: dict[int, Tensor] = {}
        """Memory of slots that have been in use, by index."""
        self._generations: dict[Any, Generation] = {}  # in the order in which their windows began
        self.keep = 1
        """Newest generations that stay once they are complete on all ranks."""
        self.seen: GenerationId | None = None
        """Newest known commit, to be stated in later markers."""

    @property
    def is_named(self) -> bool:
        """Whether a restarted process would find the ring; another process may have removed its name."""
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
        """Raise, and remove the new marker, if the ring's name is gone: the marker may have escaped its removal."""
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
            slots = {*said.slots.values(), *(expert.slot for expert in said.experts)}
            if taken.isdisjoint(slots):
                taken |= slots
                restored[said.marker.generation] = Generation(
                    state=GenerationState.EXPERTS if said.experts else GenerationState.COMPLETE,
                    slots=dict.fromkeys(said.slots.values(), True),
                    steps=dict(said.slots),
                    is_link=is_differential(said.marker.policy),
                    experts={expert.operator: expert for expert in said.experts},
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
        whole = all([(0, entry.nbytes)] == [place[:2] for place in places[entry.key]] for entry in said.marker.segments)
        return said.ring == self.header.nonce and bool(places) and (whole or bool(said.experts))

    def _drop(self, generation: Hashable, entry: Generation) -> None:
        entry.state = GenerationState.DROPPED
        if entry.pins == 0:
            self._withdraw(entry)  # before a slot can be filled again
            self._slots.give_back([*entry.slots, *(expert.slot for expert in entry.experts.values())])
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
    """Read a marker beside a ring; `None` if the marker is damaged or gone."""
    with contextlib.suppress(Corrupt, FileNotFoundError):
        return MemoryMarker.from_bytes(read_shared(path), str(path))
    return None
