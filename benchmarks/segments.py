"""Segments that no training has captured."""

from __future__ import annotations

import torch

from lightning_moe_ckpt.storage import RecordEntry, RecordRows, SegmentLayout, TensorSpec, dtype_code

_NUM_RECORDS = 64
"""Enough that digests of records are not for free."""


def made_up_layout(name: str, nbytes: int) -> SegmentLayout:
    """Return a layout of about `nbytes`; records begin with `name`."""
    shape = (nbytes // (4 * _NUM_RECORDS),)
    specs = [TensorSpec(f"{name}.{index}", torch.float32, shape) for index in range(_NUM_RECORDS)]
    return SegmentLayout(specs, metadata={})


def records_of(layout: SegmentLayout) -> RecordRows:
    """Return one record per tensor in a layout, each an operator by itself, without digests."""
    entries = [
        RecordEntry(
            name=name, operator=name, kind="full", fqn=name, state_key="param", dtype=dtype_code(span.dtype),
            global_shape=span.shape, global_start=0, numel=span.shape[0], offset=span.offset, nbytes=span.nbytes, digest="",
        )
        for name, span in layout.spans.items()
    ]  # fmt: skip
    return RecordRows(entries)
