"""Hand out a ring's slots: equal ones for segments, and smaller ones for differences or for single experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from lightning_moe_ckpt.storage import RingHeader, SlotClass

PAGE_NBYTES = 4096
_CLASSES = 64
"""Most sizes of small slots; more would not fit into the header."""


class SlotPool:
    """Pool of free slots. Not thread-safe by itself.

    Args:
        header: number and sizes of the slots.
    """

    def __init__(self, header: RingHeader) -> None:
        self._header = header
        self._free: list[list[int]] = []
        first = 0
        for _, slots in header.classes:
            self._free.append(list(range(first, first + slots)))
            first += slots

    def free(self, nbytes: int | None = None) -> int:
        """Return the number of slots that `take(nbytes)` could return."""
        found = self._class(nbytes)
        return 0 if found is None else len(self._free[found])

    def take(self, nbytes: int | None = None) -> int | None:
        """Return a slot for a segment, or the smallest small slot for `nbytes`; `None` if there is none.

        First in, first out: windows of equal length then find each step of the plan in the same place again.
        """
        found = self._class(nbytes)
        return self._free[found].pop(0) if found is not None and self._free[found] else None

    def claim(self, slots: Collection[int]) -> None:
        """Take these slots, all of them free."""
        for free in self._free:
            free[:] = [index for index in free if index not in slots]

    def give_back(self, slots: Iterable[int]) -> None:
        """Free these slots again."""
        for index in slots:
            first = 0
            for free, (_, number) in zip(self._free, self._header.classes, strict=True):
                if first <= index < first + number:
                    free.append(index)
                first += number

    def _class(self, nbytes: int | None) -> int | None:
        """Return the slot class for `nbytes`: segments' class without small slots, `None` if none is large enough."""
        small = self._header.small
        if nbytes is None or not small:
            return 0
        fitting = [
            (slot_class.nbytes, index) for index, slot_class in enumerate(small, start=1) if slot_class.nbytes >= nbytes
        ]
        return min(fitting)[1] if fitting else None


def slot_classes(sizes: Iterable[int]) -> tuple[SlotClass, ...]:
    """Return slots for these sizes in bytes, one slot for each, whole pages."""
    sizes, granule = list(sizes), PAGE_NBYTES
    while len(found := Counter(-(-size // granule) * granule for size in sizes if size)) > _CLASSES:
        granule *= 2
    return tuple(SlotClass(nbytes, number) for nbytes, number in sorted(found.items()))
