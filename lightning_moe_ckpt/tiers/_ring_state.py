"""Track which generation has which slots of a ring, and keep each expert's newest copy.

Segments take slots of a block, and differences or single experts a small slot (`SlotPool`). `RingState` knows the
slots of every generation, and which of them a later process would find.

Where generations have only some experts, a generation replaced by newer ones does not need its dense part any more, but
may have the newest copy of some experts. Such a generation is *retired* (`ExpertCopies`). Once nobody reads it, its
experts are copied to small slots, its marker is replaced by a marker of these experts only, and its slots are free. So
memory has the newest copy of each expert and, as far as there is room, the older copies that complete a generation that
is still whole.

An older copy goes before a newer copy takes its place: until a marker names the new place, the newer copy is in the
retired generation's slot, whose marker is still there. So at any moment a later process finds the newest copy.

Source: PEC/MoC (2024), Sec. 5: each module's newest version is kept in host memory. We differ: versions are taken out
of whole snapshots once these are old, by a copy beside training, so captures need no additional copies.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_moe_ckpt.errors import CheckpointError, Corrupt
from lightning_moe_ckpt.storage import ExpertSlot, GenerationId, MemoryMarker, RecordColumns, RingHeader, SlotClass
from lightning_moe_ckpt.tiers._sealed import is_differential
from lightning_moe_ckpt.tiers._shm import (
    SharedFile,
    marker_files,
    marker_paths,
    read_shared,
    remove_shared,
    unfinished_path,
    withdraw_shared,
    write_shared,
)

PAGE_NBYTES = 4096
_CLASSES = 64
"""Most sizes of small slots; more would not fit into the header."""


class SlotPool:
    """Pool of free slots: blocks of `block` equal ones for segments, and small ones. Not thread-safe by itself.

    A block has room for a generation, and one that needs more takes several: its segments lie one behind the other in a
    block, each in slots for its own size, and blocks become free as a whole. So blocks leave no gaps, whatever the
    order in which generations come and go.
    """

    def __init__(self, header: RingHeader, block: int = 1) -> None:
        self._header = header
        self.ends: dict[int, int] = {}
        """Slot behind each segment, by its first slot."""
        self._small: list[list[int]] = []
        first = header.num_slots
        for _, slots in header.small:
            self._small.append(list(range(first, first + slots)))
            first += slots
        self.lay(block)

    def lay(self, block: int) -> None:
        """Divide the slots into blocks anew; those with segments are full."""
        self.block, self._num_blocks = block, self._header.num_slots // block
        self._live: dict[int, int] = {}
        """Number of segments, by block in use."""
        self._next: dict[int, int] = {}
        """Slot for the next segment, by block in use."""
        for slot, stop in self.ends.items():
            # Several blocks if an earlier process had others.
            for at in range(slot // block, (stop - 1) // block + 1):
                self._live[at], self._next[at] = self._live.get(at, 0) + 1, (at + 1) * block

    @property
    def free(self) -> int:
        """Number of slots in free blocks."""
        return (self._num_blocks - len(self._live)) * self.block

    def take(self, nbytes: int, beside: int | None = None) -> int | None:
        """Return the first slot for a segment of `nbytes`; `None` if there is no room. `beside` is the slot of the
        generation's segment before; `None` for its first.
        """
        slots, at = -(-nbytes // self._header.slot_nbytes), -1 if beside is None else beside // self.block
        if beside is None or self._next[at] + slots > (at + 1) * self.block:
            at = next(at for at in count() if at not in self._live)
            if at == self._num_blocks or slots > self.block:
                return None
            self._next[at] = at * self.block
        first = self._next[at]
        self._next[at] = self.ends[first] = first + slots
        self._live[at] = self._live.get(at, 0) + 1
        return first

    def blocks(self, sizes: Iterable[int]) -> int:
        """Return the number of blocks that a generation with segments of these bytes needs."""
        number = left = 0
        for nbytes in sizes:
            if (slots := -(-nbytes // self._header.slot_nbytes)) > left:
                number, left = number + 1, self.block
            left -= slots
        return number if left >= 0 else self._num_blocks + 1

    def fits(self, sizes: Sequence[int], going: Iterable[int]) -> bool:
        """Return whether segments of these bytes have room: the first now, others once the `going` segments are gone."""
        free, freed = self._num_blocks - len(self._live), set[int]()
        for slot in going:
            if slot in self.ends:
                freed.add(slot // self.block)
        return free > 0 and free + len(freed) >= self.blocks(sizes)

    def free_small(self, nbytes: int) -> int:
        """Return the number of slots that `take_small` could return."""
        return 0 if (found := self._class(nbytes)) is None else len(self._small[found])

    def take_small(self, nbytes: int) -> int | None:
        """Return the smallest small slot for `nbytes`; `None` if there is none."""
        found = self._class(nbytes)
        return self._small[found].pop(0) if found is not None and self._small[found] else None

    def claim(self, slots: Mapping[int, int]) -> bool:
        """Take slots for so many bytes each, by the first slot; return whether all were free, else take none."""
        small = [[slot for slot in free if slot not in slots] for free in self._small]
        unused, ends = {slot for free in self._small for slot in free}, dict[int, int]()
        for slot, nbytes in slots.items():
            if slot < self._header.num_slots:
                ends[slot] = stop = slot + -(-nbytes // self._header.slot_nbytes)
                if stop > self._header.num_slots or any(a < stop and slot < b for a, b in self.ends.items()):
                    return False
            elif slot not in unused:
                return False
        self.ends |= ends
        self._small = small
        self.lay(self.block)
        return True

    def give_back(self, slots: Iterable[int]) -> None:
        """Free these slots again, each with all of its segment."""
        for slot in slots:
            if slot in self.ends:
                stop = self.ends.pop(slot)
                for at in range(slot // self.block, (stop - 1) // self.block + 1):
                    self._live[at] -= 1
                    if not self._live[at]:
                        del self._live[at]
                continue
            first = self._header.num_slots
            for free, (_, number) in zip(self._small, self._header.small, strict=True):
                if first <= slot < first + number:
                    free.append(slot)
                first += number

    def _class(self, nbytes: int) -> int | None:
        """Return the class of the smallest slots for `nbytes`; `None` if none are large enough."""
        fitting = [(each.nbytes, index) for index, each in enumerate(self._header.small) if each.nbytes >= nbytes]
        return min(fitting)[1] if fitting else None


def slot_classes(sizes: Iterable[int]) -> tuple[SlotClass, ...]:
    """Return slots for these sizes in bytes, one slot for each, whole pages."""
    sizes, granule = list(sizes), PAGE_NBYTES
    while len(found := Counter(-(-size // granule) * granule for size in sizes if size)) > _CLASSES:
        granule *= 2
    return tuple(SlotClass(nbytes, number) for nbytes, number in sorted(found.items()))


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
    """State of a ring. Private methods that change it expect the lock to be held."""

    def __init__(self, path: Path, memory: Tensor, header: RingHeader, file: SharedFile | None = None) -> None:
        self.path, self._file, self.header = path, file, header
        self._memory: Tensor | None = memory
        self._lock = threading.Lock()
        self._unlinked = False
        self._slots = SlotPool(self.header)
        self.experts: Mapping[str, int] = {}
        """Bytes of the operators whose newest copy stays, by name; empty where generations have all operators."""
        self.on_retired: Callable[[], None] = lambda: None
        """Called when `condense` has something to do, from any thread."""
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
        if (entry := self._generations.get(generation)) is None or entry.state is GenerationState.DROPPED:
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
        assert self._memory is not None, "the ring is closed"
        size = self.header.slot_nbytes
        if (end := self._slots.ends.get(index)) is not None:
            return self._memory[index * size : end * size]
        start, nbytes = self.header.extent(index)
        return self._memory[start : start + nbytes]

    def _withdraw(self, entry: Generation) -> None:
        if entry.marker is not None:
            withdraw_shared(entry.marker)
            entry.marker = None

    def _restore_published(self) -> None:
        found = [(path, read_statement(path)) for path in marker_paths(self.path)]
        good = [(path, marker) for path, marker in found if marker is not None and self._holds(marker)]
        restored: dict[GenerationId, Generation] = {}
        for path, said in sorted(good, key=lambda each: each[1].marker.generation, reverse=True):
            sizes = Counter[int]()
            for entry in said.marker.segments if said.slots else ():
                sizes[said.slots[entry.step]] += entry.nbytes
            if self._slots.claim({**sizes, **{expert.slot: expert.nbytes for expert in said.experts}}):
                restored[said.marker.generation] = Generation(
                    state=GenerationState.EXPERTS if said.experts else GenerationState.COMPLETE,
                    slots=dict.fromkeys(said.slots.values(), True),
                    steps=dict(said.slots),
                    is_link=is_differential(said.marker.policy),
                    experts={expert.operator: expert for expert in said.experts},
                    marker=path,
                )
        self._generations = {name: restored[name] for name in sorted(restored)}
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


def _settled(entry: Generation) -> Collection[str]:
    """Return the operators in a complete generation that will get small slots, and are kept until then."""
    if not entry.everywhere or not entry.is_whole or entry.said is None:
        return ()
    return {op for segment in entry.said.marker.segments for op in RecordColumns.of(segment.records).operator}


class ExpertCopies(RingState):
    """Part of a ring: experts from retired generations."""

    def condense(self) -> None:
        """Bring experts of retired generations to small slots, and free all other slots; from one thread at a time.
        Raises `Corrupt` if a marker is damaged, `OSError` if there is no room for another; the marker's generation is
        dropped.
        """
        while True:
            with self._lock:
                name = next((each for each, entry in self._generations.items() if entry.is_free_to_go), None)
                if name is None or self._memory is None:
                    return
                entry = self._generations[name]
                entry.pins += 1
            try:
                self._condense(name, entry)
            finally:
                with self._lock:
                    entry.pins -= 1
                    if entry.state is not GenerationState.EXPERTS:
                        self._drop(name, entry)

    # -- private

    def _condense(self, name: Any, entry: Generation) -> None:
        """Bring the experts of a pinned generation to small slots."""
        if entry.said is None and entry.marker is not None:
            entry.said = read_statement(entry.marker)
        if entry.said is None:
            raise Corrupt(f"the marker of {name} is not what was written: its experts are not kept in memory.")
        with self._lock:
            later = [known for generation, known in self._generations.items() if generation > name]
        newer = {op for known in later for op in known.experts} | {op for known in later for op in _settled(known)}
        wanted = [each for each in ExpertSlot.all_of(entry.said.marker, self.experts) if each.operator not in newer]
        operators = {each.operator for each in wanted}
        self._let_go(name, operators, self._replaced)
        placed = self._place(wanted)
        if len(placed) < len(
            wanted
        ):  # copies that complete an older generation have to go: there is room for one copy of each
            self._let_go(name, self.experts, lambda op, copies: copies[:-1] if op in operators else copies[:-2])
            missing = operators - {each.operator for each in placed}
            placed += self._place([each for each in wanted if each.operator in missing])
        try:
            for each in placed:
                source = self._view(entry.steps[each.step])[each.start : each.start + each.nbytes]
                self._view(each.slot)[: each.nbytes].copy_(source)
            self._restate(name, entry, placed)
        except BaseException:
            with self._lock:
                self._slots.give_back(each.slot for each in placed)
            raise

    def _place(self, wanted: Sequence[ExpertSlot]) -> list[ExpertSlot]:
        """Take a slot for each wanted expert, as far as there are slots; return experts with slots."""
        with self._lock:
            slots = [self._slots.take_small(each.nbytes) for each in wanted]
        return [each._replace(slot=slot) for each, slot in zip(wanted, slots, strict=True) if slot is not None]

    def _replaced(self, _: str, copies: Sequence[Any]) -> list[Any]:
        """Return an expert's copies that complete no other whole generation; the last of `copies` is new."""
        whole = [name for name, entry in self._generations.items() if entry.is_whole and name != copies[-1]]
        return [each for each, after in pairwise(copies) if not any(each <= one < after for one in whole)]

    def _let_go(
        self, name: Any, operators: Collection[str], which: Callable[[str, Sequence[Any]], Sequence[Any]]
    ) -> None:
        """Free slots of these experts' copies: `which` picks from all, oldest first, with `name` last."""
        going = defaultdict[Any, set[str]](set)
        with self._lock:
            entries = dict(self._generations)
            for operator in operators:
                copies = sorted(each for each, entry in entries.items() if operator in entry.experts)
                for generation in which(operator, [*copies, name]):
                    going[generation].add(operator)
        for each, gone in going.items():
            left = [slot for operator, slot in entries[each].experts.items() if operator not in gone]
            self._restate(each, entries[each], left)

    def _restate(self, name: Hashable, entry: Generation, experts: Sequence[ExpertSlot]) -> None:
        """Keep only these experts of a generation: its marker says so first, then all its other slots are given back."""
        path, said = entry.marker, entry.said
        if path is not None and said is None and experts:
            said = read_statement(path)
        left = None if said is None or not experts else replace(said, seen=self.seen).only(experts)
        if path is not None and left is not None:
            write_shared(unfinished_path(path), *left.parts())
        with self._lock:
            known, before = self._generations.get(name) is entry, {expert.slot for expert in entry.experts.values()}
            if path is not None and left is not None:
                if known and entry.marker == path:
                    unfinished_path(path).rename(path)
                else:
                    remove_shared(unfinished_path(path))
            if not known or entry.state is GenerationState.DROPPED:  # discarded meanwhile
                self._slots.give_back(expert.slot for expert in experts if expert.slot not in before)
                return
            if left is None or self._unlinked or not self.is_named:
                self._withdraw(entry)
            freed = {*entry.slots, *before} - {expert.slot for expert in experts}
            entry.state, entry.slots, entry.steps = GenerationState.EXPERTS, {}, {}
            entry.experts, entry.said = {expert.operator: expert for expert in experts}, left
            self._slots.give_back(freed)
            if entry.marker is None:
                self._drop(name, entry)
