"""Keep each expert's newest copy, where generations have only some experts.

A generation replaced by newer ones does not need its dense part any more, but may have the newest copy of some experts.
Such a generation is *retired*. Once nobody reads it, its experts are copied to small slots, its marker is replaced by a
marker of these experts only, and its slots are free. So memory has the newest copy of each expert and, as far as there
is room, the older copies that complete a generation that is still whole.

An older copy goes before a newer copy takes its place: until a marker names the new place, the newer copy is in the
retired generation's slot, whose marker is still there. So at any moment a later process finds the newest copy.

Source: PEC/MoC (2024), Sec. 5: each module's newest version is kept in host memory. We differ: versions are taken out
of whole snapshots once these are old, by a copy beside training, so captures need no additional copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage import ExpertSlot, RecordColumns
from lightning_moe_ckpt.tiers._ring_state import Generation, GenerationState, RingState, read_statement
from lightning_moe_ckpt.tiers._shm import remove_shared, unfinished_path, write_shared


def _settled(entry: Generation) -> Collection[str]:
    """Return the operators in a complete generation that will get small slots, and are kept until then."""
    if not entry.everywhere or not entry.is_whole or entry.said is None:
        return ()
    return {op for segment in entry.said.marker.segments for op in RecordColumns.of(segment.records).operator}


class ExpertCopies(RingState):
    """Part of a ring: experts from retired generations."""

    def condense(self) -> None:
        """Bring experts of retired generations to small slots, and free all other slots; from one thread at a time.

        Raises:
            Corrupt: a marker is damaged; its generation is dropped.
            OSError: there is no room for another marker; its generation is dropped.
        """
        while True:
            with self._lock:
                name = next(
                    (generation for generation, entry in self._generations.items() if entry.is_free_to_go), None
                )
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
        """Return the wanted experts that got a slot, each with its slot."""
        with self._lock:
            slots = [self._slots.take(each.nbytes) for each in wanted]
        return [each._replace(slot=slot) for each, slot in zip(wanted, slots, strict=True) if slot is not None]

    def _replaced(self, _: str, copies: Sequence[Any]) -> list[Any]:
        """Return an expert's copies that complete no other whole generation; the last of `copies` is new."""
        whole = [
            generation for generation, entry in self._generations.items() if entry.is_whole and generation != copies[-1]
        ]
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
        """Keep only these experts of a generation: first its marker says so, then other slots are free."""
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
