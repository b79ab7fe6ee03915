"""Segments with records of real tensors, the entries that describe them, and reading with every digest compared."""

from __future__ import annotations

import torch

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage import (
    RecordEntry,
    RunStore,
    SegmentEntry,
    SegmentLayout,
    TensorSpec,
    digest_of,
    dtype_code,
)
from lightning_moe_ckpt.storage._catalog import expect_places

# Two floats would do; sizes that are not a multiple of the alignment leave pads between the records.
LAYOUT = SegmentLayout(
    [
        TensorSpec("w", torch.float32, (700, 3)),
        TensorSpec("m", torch.bfloat16, (4099,)),
        TensorSpec("v", torch.float32, (5,)),
    ],
    metadata={"plan_hash": "plan"},
)


def segment_bytes(seed: int) -> bytes:
    """A segment of `LAYOUT` with other values for each seed."""
    buffer = torch.zeros(LAYOUT.nbytes, dtype=torch.uint8)
    LAYOUT.write_header(buffer)
    generator = torch.Generator().manual_seed(seed)
    for name in LAYOUT.spans:
        view = LAYOUT.view(buffer, name)
        view.copy_(torch.randn(view.shape, generator=generator))
    return buffer.numpy().tobytes()


def entry_of(key: str, step: int, data: bytes) -> SegmentEntry:
    """What a marker says of a segment of `LAYOUT`."""
    return SegmentEntry(
        step=step,
        key=key,
        nbytes=len(data),
        digest=digest_of(data),
        records=tuple(_record(name, data) for name in LAYOUT.spans),
    )


def _record(name: str, data: bytes) -> RecordEntry:
    span = LAYOUT.spans[name]
    return RecordEntry(
        name=name, operator="blocks.0", kind="full", fqn=name, state_key="param", dtype=dtype_code(span.dtype),
        global_shape=span.shape, global_start=0, numel=span.nbytes // span.dtype.itemsize, offset=span.offset,
        nbytes=span.nbytes, digest=digest_of(data[span.offset : span.offset + span.nbytes]),
    )  # fmt: skip


def read_segment(store: RunStore, entry: SegmentEntry, out: memoryview) -> None:
    """Fill `out` with the whole file, and compare its digest."""
    store.read_range(entry, 0, out)
    _expect(entry.key, out, entry.digest)


def read_record(store: RunStore, entry: SegmentEntry, record: RecordEntry, out: memoryview) -> None:
    """Fill `out` with one record, and compare its digest."""
    store.read_range(entry, record.offset, out)
    _expect(f"{entry.key}: {record.name}", out, record.digest)


def verify_records(segment: SegmentEntry, data: memoryview) -> None:
    """Compare every record of a segment in memory: its place in the header, its dtype and its digest."""
    expect_places(segment, SegmentLayout.parse(data))
    for record in segment.records:
        _expect(f"{segment.key}: {record.name}", data[record.offset : record.offset + record.nbytes], record.digest)


def _expect(what: str, data: memoryview, written: str) -> None:
    if (found := digest_of(data)) != written:
        raise Corrupt(f"{what}: digest {found}, its marker says {written}.")
