"""A generation that references, made by hand from two dense ones of a real fit: what a partial policy stores, byte for byte."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from datetime import timedelta
from math import prod
from pathlib import Path

import torch
from stored._segments import read_segment

from lightning_moe_ckpt.journal import decode_journal, encode_journal
from lightning_moe_ckpt.storage import (
    Commit,
    GenerationId,
    RankMarker,
    RecordEntry,
    RecordRows,
    Retention,
    RunStore,
    SegmentEntry,
    SegmentLayout,
    TensorSpec,
    carry_forward,
    digest_of,
    dtype_of,
    open_backend,
    segment_key,
)

STEP = 5


def add_referring(url: str, target: Path, lacking: Sequence[str], *, older: int, newer: int) -> str:
    """Copy a dense run and add generation 5: the state of step `newer`, with some operators as of step `older`.

    Args:
        url: the run.
        target: where to copy it.
        lacking: operators that generation 5 references.
        older: step of the generation that it references them from.
        newer: step of the generation that has all else.
    """
    shutil.copytree(url, target)
    store = RunStore.open(open_backend(str(target)), resume="must")
    commits = {commit.generation.step: commit for commit in store.candidates()}
    assert store.open_incarnation(commits[newer].generation) is not None
    generation = store.name(STEP)
    ranks = range(commits[newer].world_size)
    sources = (commits[older], commits[newer])
    markers = [_write_rank(store, generation, rank, sources, set(lacking)) for rank in ranks]
    store.commit(markers[0], timeout=timedelta())
    store.retain(Retention(last=100))
    store.close()
    return str(target)


def _write_rank(
    store: RunStore, generation: GenerationId, rank: int, sources: tuple[Commit, Commit], lacking: set[str]
) -> RankMarker:
    older, newer = sources
    source = store.read_marker(newer, rank)
    data = bytearray(source.segments[0].nbytes)
    read_segment(store, source.segments[0], memoryview(data))
    entry = _without(data, source.segments[0].records, generation, rank, lacking)
    key, view = entry[0].key, entry[1]
    assert store.put_segment(generation, rank, STEP, view) == key
    marker = dataclasses.replace(
        source,
        generation=generation,
        segments=(entry[0],),
        lineage=store.lineage,
        referenced=carry_forward(store.read_marker(older, rank), lacking),
    )
    store.put_marker(marker)
    return marker


def _without(
    data: bytearray, records: Sequence[RecordEntry], generation: GenerationId, rank: int, lacking: set[str]
) -> tuple[SegmentEntry, memoryview]:
    """The file of a rank without some operators, and without scalars of what several experts share: the journal has them."""
    shared = {r.fqn for r in records if "expert." in r.operator}
    is_scalar = {r.name for r in records if r.fqn in shared and r.global_shape == () and r.state_key != "present"}
    kept = [r for r in records if r.operator not in lacking and r.name not in is_scalar]
    scalars: dict[str, dict[str, torch.Tensor]] = {}
    for r in [r for r in records if r.name in is_scalar]:
        scalar = torch.frombuffer(data[r.offset : r.offset + r.nbytes], dtype=dtype_of(r.dtype))
        scalars.setdefault(r.fqn, {})[r.state_key] = scalar.view(()).clone()
    specs = [TensorSpec(r.name, torch.uint8, (r.nbytes + 1000 * (r.kind == "journal"),)) for r in kept]
    layout = SegmentLayout(_typed(specs, kept), metadata={"format": "lightning-moe-ckpt"})
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.write_header(buffer)
    placed = []
    for r in kept:
        span, value = layout.spans[r.name], bytes(data[r.offset : r.offset + r.nbytes])
        if r.kind == "journal":
            value = _journal(value, scalars, span.nbytes)
        buffer[span.offset : span.offset + len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        more = {"numel": span.nbytes, "global_shape": (span.nbytes,)} if r.kind == "journal" else {}
        placed.append(dataclasses.replace(r, offset=span.offset, nbytes=span.nbytes, **more))  # type: ignore[arg-type]
    view = memoryview(buffer.numpy())  # type: ignore[arg-type]  # numpy's stubs do not say that arrays are buffers
    entry = SegmentEntry(
        step=STEP,
        key=segment_key(generation, rank, STEP),
        nbytes=view.nbytes,
        digest=digest_of(view),
        records=RecordRows(placed).digested_with_file(view)[0],
    )
    return entry, view


def _typed(specs: Sequence[TensorSpec], records: Sequence[RecordEntry]) -> list[TensorSpec]:
    """With the types of the records, since readers compare them."""
    dtypes = [dtype_of(record.dtype) for record in records]
    return [
        TensorSpec(spec.name, dtype, (prod(spec.shape) * spec.dtype.itemsize // dtype.itemsize,))
        for spec, dtype in zip(specs, dtypes, strict=True)
    ]


def _journal(record: bytes, scalars: dict[str, dict[str, torch.Tensor]], capacity: int) -> bytes:
    journal = decode_journal(torch.frombuffer(bytearray(record), dtype=torch.uint8))
    journal["outcome"] = {**(journal["outcome"] or {}), "scalars": scalars}
    return encode_journal(journal, capacity)
