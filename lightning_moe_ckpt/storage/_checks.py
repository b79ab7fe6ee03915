"""Checking a segment in memory against what its marker says."""

from __future__ import annotations

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage._entries import SegmentEntry
from lightning_moe_ckpt.storage._segment import SegmentLayout, dtype_of


def check_places(segment: SegmentEntry, data: memoryview) -> SegmentLayout:
    """Check that every record lies where the marker says; its bytes are not looked at.

    Args:
        segment: as its marker describes it.
        data: all bytes of the file.

    Returns:
        The layout that the file's header says.

    Raises:
        Corrupt: the first record that is elsewhere, or the header is not one.
    """
    layout = SegmentLayout.parse(data)
    for record in segment.records:
        span = layout.spans.get(record.name)
        place = (record.offset, record.nbytes, dtype_of(record.dtype))
        if span is None or (span.offset, span.nbytes, span.dtype) != place:
            raise Corrupt(f"{segment.key}: {record.name} is not where its marker says.")
    return layout


def expect_digest(what: str, found: str, written: str) -> None:
    """Raise `Corrupt` unless the digests are equal."""
    if found != written:
        raise Corrupt(
            f"{what}: digest {found}, its marker says {written}. Another copy or an older generation may be good."
        )
