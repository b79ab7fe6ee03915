"""Check that the markers' statements on tensors fit together: all digests can be right, and still no state result.

Records of one tensor must agree on its shape and type, hold every element of it, and on one rank none twice. What the
module's description names must be stored. (Readers of files check that a record's place and size agree with the file's
header.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from math import prod

from lightning_moe_ckpt.inspection._assemble import BUFFER, PARAM
from lightning_moe_ckpt.storage import RankMarker, RecordEntry

_SHOWN = 5
"""Most disagreements of a kind that are named one by one."""

_Key = tuple[str, str, str]
"""Kind, parameter, and part of it."""
_Piece = tuple[int, int, int]
"""Rank, first element, and the element after the last."""


def disagreements(markers: Sequence[RankMarker]) -> list[str]:
    """Return what does not fit together in the markers of a generation's ranks, by name; empty if all does."""
    found: dict[_Key, set[tuple[str, tuple[int, ...]]]] = defaultdict(set)
    pieces: dict[str, list[_Piece]] = defaultdict(list)
    stored: set[str] = set()
    for marker in markers:
        for record in _records(marker):
            if record.kind == BUFFER:
                stored.add(record.fqn)
            else:
                found[record.kind, record.fqn, record.state_key].add((record.dtype, record.global_shape))
            if record.kind == "full" and record.state_key == PARAM:
                stored.add(record.fqn)
                end = record.global_start + record.numel
                pieces[record.fqn].append((marker.rank, record.global_start, end))
    shapes = {fqn: shape for (kind, fqn, key), each in found.items() if key == PARAM for _, shape in each}
    return [
        *_few(_unequal(found)),
        *_few(_other_shapes(found, shapes)),
        *_few(chain.from_iterable(_gaps(fqn, each, prod(shapes[fqn])) for fqn, each in pieces.items())),
        *_few(_not_stored(markers[0], stored)),
    ]


def _records(marker: RankMarker) -> Iterator[RecordEntry]:
    segments = [*marker.segments, *(each.segment for each in marker.referenced)]
    return (record for segment in segments for record in segment.records if record.fqn)


def _unequal(found: dict[_Key, set[tuple[str, tuple[int, ...]]]]) -> Iterator[str]:
    for (kind, fqn, key), said in found.items():
        if len(said) > 1:
            words = " and ".join(sorted(f"{list(shape)} {dtype}" for dtype, shape in said))
            yield f"`{fqn}`: its {kind} records of {key} say {words}"


def _other_shapes(
    found: dict[_Key, set[tuple[str, tuple[int, ...]]]], shapes: dict[str, tuple[int, ...]]
) -> Iterator[str]:
    """Report state whose shape is neither its parameter's nor a scalar's."""
    for (kind, fqn, key), said in found.items():
        for _, shape in said:
            if shape and shape != shapes.get(fqn, shape):
                yield f"`{fqn}`: its {kind} {key} has shape {list(shape)}, the parameter {list(shapes[fqn])}"


def _gaps(fqn: str, pieces: Sequence[_Piece], numel: int) -> Iterator[str]:
    """Report elements that no rank wrote, or one rank twice. Ranks that number their own experts write the same names."""
    end = 0
    for _, start, stop in sorted(pieces, key=lambda piece: piece[1:]):
        if start > end:
            break
        end = max(end, stop)
    if end != numel:
        yield f"`{fqn}`: element {end} of {numel} is nowhere stored"
    for (rank, _, stop), (other, start, _) in pairwise(sorted(pieces)):
        if rank == other and start < stop:
            yield f"`{fqn}`: element {start} is stored twice by rank {rank}"


def _not_stored(marker: RankMarker, stored: set[str]) -> Iterator[str]:
    """Report names of the module's description that no record has."""
    if marker.module is None:
        return
    module = marker.module.read()
    named = [*chain.from_iterable(module.param_groups), *module.unsaved, *module.aliases.values()]
    yield from (f"`{name}` is named by the module's description and stored by no rank" for name in set(named) - stored)


def _few(reasons: Iterator[str]) -> Iterator[str]:
    every = sorted(reasons)
    yield from every[:_SHOWN]
    if len(every) > _SHOWN:
        yield f"and {len(every) - _SHOWN} more of the kind"
