"""Choose the next generation's references: the two newest stored copies of every operator that it does not store.

References stay flat: a marker names the files with the bytes, never a generation that references in turn. So a partial
generation needs only the older generations with the newest copy of some operator, however long the chain is. The second
copy is the spare: if the newest copy is damaged, a restore uses the spare.

Source: PEC (2024), Sec. 3: a checkpoint of some experts is completed by each other expert's last copy. We differ in the
second copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from lightning_moe_ckpt.storage._entries import RecordEntry, ReferencedEntry, SegmentEntry
from lightning_moe_ckpt.storage._names import GenerationId
from lightning_moe_ckpt.storage._records import RankMarker

_FULL = "full"

BadCopies = Mapping[str, Collection[GenerationId]]
"""Generations with a damaged copy of an operator, by operator; includes the newest copy; equal on all ranks."""

_NONE: BadCopies = MappingProxyType({})


def carry_forward(
    previous: RankMarker, lacking: Collection[str], bad: BadCopies = _NONE
) -> tuple[ReferencedEntry, ...]:
    """Return the references of this rank's marker in the generation after `previous`.

    Whole operators are referenced, not single records: generations may cut an operator differently among ranks, but
    each generation with the operator has all of it.

    Args:
        previous: this rank's marker of one of the two newest committed generations, the same generation on all ranks.
            These two, and their references, are never given up during a save.
        lacking: names of the operators without a full record on any rank in the new generation.
        bad: damaged copies; the spare is referenced instead.

    Returns:
        Full records of the lacking operators that this rank stored or referenced in `previous`: one entry per file,
        oldest first.

    Raises:
        ValueError: `previous` is a window of several steps, so its records are not the state of one step.
    """
    wanted = set(lacking)
    newest = _only(_newest(previous), lambda name, at: name in wanted and at not in bad.get(name, ()))
    instead = _only(previous.spares, lambda name, at: name in wanted and name in bad and at not in bad[name])
    return _by_file([*newest, *instead])


def carry_spares(
    previous: RankMarker, lacking: Collection[str], stored: Collection[str], bad: BadCopies = _NONE
) -> tuple[ReferencedEntry, ...]:
    """Return the spares in this rank's marker of the generation after `previous`.

    Args:
        previous: as in `carry_forward`; may be of an older generation if nothing is referenced.
        lacking: as in `carry_forward`; these operators keep their spare.
        stored: names of the operators that the new generation stores; their newest older copy becomes the spare.
        bad: as in `carry_forward`.

    Returns:
        Full records, one entry per file, oldest first.

    Raises:
        ValueError: `previous` is a window of several steps.
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
    """Yield every full record of a rank with its file: own segments first, then referenced files."""
    files: Sequence[SegmentEntry] = [*marker.segments, *(entry.segment for entry in marker.referenced)]
    return ((file, record) for file in files for record in file.records if record.kind == _FULL)


def _newest(previous: RankMarker) -> list[ReferencedEntry]:
    """Return the files with the newest copies: referenced ones, then the marker's. Refuses several steps."""
    if len(previous.steps) != 1:
        raise ValueError(
            f"`carry_forward({previous.generation})`: it is a window of {len(previous.steps)} steps; only dense and "
            "partial generations can refer to. Store a dense one first."
        )
    own = ReferencedEntry(generation=previous.generation, segment=previous.segments[0])
    return [*previous.referenced, own]


def _only(entries: Iterable[ReferencedEntry], wanted: Callable[[str, GenerationId], bool]) -> Iterator[ReferencedEntry]:
    """Yield the entries with only those full records whose operator is `wanted` from their generation."""
    for entry in entries:
        names = {record.operator for record in entry.segment.records if record.kind == _FULL}
        chosen = {name for name in names if wanted(name, entry.generation)}
        records = tuple(r for r in entry.segment.records if r.kind == _FULL and r.operator in chosen)
        if records:
            yield replace(entry, segment=replace(entry.segment, records=records))


def _by_file(entries: Iterable[ReferencedEntry]) -> tuple[ReferencedEntry, ...]:
    """Merge entries of the same file; oldest first."""
    files: dict[tuple[GenerationId, int], ReferencedEntry] = {}
    for entry in entries:
        known = files.setdefault((entry.generation, entry.segment.step), entry)
        if known is not entry:
            records = sorted((*known.segment.records, *entry.segment.records), key=lambda record: record.offset)
            files[entry.generation, entry.segment.step] = replace(
                known, segment=replace(known.segment, records=tuple(records))
            )
    return tuple(files[name] for name in sorted(files))
