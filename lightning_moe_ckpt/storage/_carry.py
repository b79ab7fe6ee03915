"""What the next generation borrows: the newest stored state of every operator that it lacks, and the one before it.

References stay flat. A marker names files that hold bytes, never a generation that borrows them in turn, so however long a
chain of partial generations is, each needs as many older ones as hold a newest state, and nothing older.

Of every operator two copies are named, so that no single file is all there is of it: where the newest turns out bad, the
one before it is a spare.

Source: PEC (2024), Sec. 3: a checkpoint of some experts is completed by the last one of each other expert. We differ in
the second copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from lightning_moe_ckpt.storage._entries import BorrowedEntry, SegmentEntry
from lightning_moe_ckpt.storage._names import GenerationId
from lightning_moe_ckpt.storage._record_table import RecordEntry
from lightning_moe_ckpt.storage._records import RankMarker

_FULL = "full"

BadCopies = Mapping[str, Collection[GenerationId]]
"""By operator: generations whose copy of it turned out bad, among them the newest one; the same on all ranks."""

_NONE: BadCopies = MappingProxyType({})


def carry_forward(previous: RankMarker, lacking: Collection[str], bad: BadCopies = _NONE) -> tuple[BorrowedEntry, ...]:
    """What the marker of this rank borrows in the generation after `previous`.

    By operator, not by record: how an operator is cut among its holders may differ between generations, but each
    generation that has it has all of it, on whatever ranks.

    Args:
        previous: this rank's marker of one of the two newest committed generations of the run, the same on all ranks;
            these, and what they borrow from, are never given up while a save goes on.
        lacking: names of the operators of which no rank stores a full record in the new generation.
        bad: copies that are not borrowed any more; the spare is, in their place.

    Returns:
        Full records of those operators that this rank stored then, or had borrowed: file by file, oldest first. Empty
        if it had none.

    Raises:
        ValueError: `previous` is a window of several steps, whose records are no states of one step.
    """
    wanted = set(lacking)
    newest = _only(_newest(previous), lambda name, at: name in wanted and at not in bad.get(name, ()))
    instead = _only(previous.spares, lambda name, at: name in wanted and name in bad and at not in bad[name])
    return _by_file([*newest, *instead])


def carry_spares(
    previous: RankMarker, lacking: Collection[str], stored: Collection[str], bad: BadCopies = _NONE
) -> tuple[BorrowedEntry, ...]:
    """The older copies that the marker of this rank names in the generation after `previous`.

    Args:
        previous: as in `carry_forward`, or of an older generation if nothing is borrowed.
        lacking: as there.
        stored: names of the operators that the new generation stores, of which the newest copy so far becomes the spare.
        bad: as there.

    Returns:
        As there.

    Raises:
        ValueError: as there.
    """
    waiting, replaced = set(lacking), set(stored)
    kept = _only(
        previous.spares,
        lambda name, at: (
            (name in waiting and name not in bad) or (name in replaced and name in bad and at not in bad[name])
        ),
    )
    newest = _only(_newest(previous), lambda name, at: name in replaced and at not in bad.get(name, ()))
    return _by_file([*kept, *newest])


def full_records(marker: RankMarker) -> Iterator[tuple[SegmentEntry, RecordEntry]]:
    """Every full record of a rank's part, with the file that holds it: its own segments, then what it borrows."""
    files: Sequence[SegmentEntry] = [*marker.segments, *(each.segment for each in marker.borrowed)]
    return ((file, record) for file in files for record in file.records if record.kind == _FULL)


def _newest(previous: RankMarker) -> list[BorrowedEntry]:
    """The newest copies that a marker names."""
    if len(previous.steps) != 1:
        raise ValueError(
            f"`carry_forward({previous.generation})`: it is a window of {len(previous.steps)} steps; only dense and "
            "partial generations can be borrowed from. Store a dense one first."
        )
    own = BorrowedEntry(generation=previous.generation, segment=previous.segments[0])
    return [*previous.borrowed, own]


def _only(entries: Iterable[BorrowedEntry], wanted: Callable[[str, GenerationId], bool]) -> Iterator[BorrowedEntry]:
    """Full records of the operators that are wanted of a generation."""
    for each in entries:
        names = {record.operator for record in each.segment.records if record.kind == _FULL}
        chosen = {name for name in names if wanted(name, each.generation)}
        records = tuple(r for r in each.segment.records if r.kind == _FULL and r.operator in chosen)
        if records:
            yield replace(each, segment=replace(each.segment, records=records))


def _by_file(entries: Iterable[BorrowedEntry]) -> tuple[BorrowedEntry, ...]:
    """One entry per file, oldest first."""
    files: dict[tuple[GenerationId, int], BorrowedEntry] = {}
    for each in entries:
        known = files.setdefault((each.generation, each.segment.step), each)
        if known is not each:
            records = sorted((*known.segment.records, *each.segment.records), key=lambda record: record.offset)
            files[each.generation, each.segment.step] = replace(
                known, segment=replace(known.segment, records=tuple(records))
            )
    return tuple(files[name] for name in sorted(files))
