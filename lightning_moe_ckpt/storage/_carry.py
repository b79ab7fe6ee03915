"""What the next generation borrows: the newest stored state of every operator that it lacks.

References stay flat. A marker names files that hold bytes, never a generation that borrows them in turn, so however long a
chain of partial generations is, each needs as many older ones as hold a newest state, and nothing older.

Source: PEC (2024), Sec. 3: a checkpoint of some experts is completed by the last one of each other expert.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from lightning_moe_ckpt.storage._entries import BorrowedEntry, SegmentEntry
from lightning_moe_ckpt.storage._record_table import RecordEntry
from lightning_moe_ckpt.storage._records import RankMarker

_FULL = "full"


def carry_forward(previous: RankMarker, lacking: Collection[str]) -> tuple[BorrowedEntry, ...]:
    """What the marker of this rank borrows in the generation after `previous`.

    By operator, not by record: how an operator is cut among its holders may differ between generations, but each
    generation that has it has all of it, on whatever ranks.

    Args:
        previous: this rank's marker of one of the two newest committed generations of the run, the same on all ranks;
            these, and what they borrow from, are never given up while a save goes on.
        lacking: names of the operators of which no rank stores a full record in the new generation.

    Returns:
        Full records of those operators that this rank stored then, or had borrowed: file by file, oldest first. Empty
        if it had none.

    Raises:
        ValueError: `previous` is a window of several steps, whose records are no states of one step.
    """
    if len(previous.segments) != 1:
        raise ValueError(
            f"`carry_forward({previous.generation})`: it is a window of {len(previous.segments)} steps; only dense and "
            "partial generations can be borrowed from. Store a dense one first."
        )
    own = BorrowedEntry(generation=previous.generation, segment=replace(previous.segments[0], side_file=None))
    kept = (_only(each, lacking) for each in (*previous.borrowed, own))
    return tuple(each for each in kept if each.segment.records)


def full_records(marker: RankMarker) -> Iterator[tuple[SegmentEntry, RecordEntry]]:
    """Every full record of a rank's part, with the file that holds it: its own segments, then what it borrows."""
    files: Sequence[SegmentEntry] = [*marker.segments, *(each.segment for each in marker.borrowed)]
    return ((file, record) for file in files for record in file.records if record.kind == _FULL)


def _only(borrowed: BorrowedEntry, lacking: Collection[str]) -> BorrowedEntry:
    chosen = tuple(each for each in borrowed.segment.records if each.kind == _FULL and each.operator in lacking)
    return replace(borrowed, segment=replace(borrowed.segment, records=chosen))
