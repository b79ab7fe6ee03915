"""What layouts spell by column has the bytes that the JSON encoder would give, whatever tensors are called."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import astuple, replace
from functools import partial

import pytest
import torch
from torch import nn

from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.operators import StateSchema, discover
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.policies import Plan, Shard, all_names
from lightning_moe_ckpt.snapshot import FileLayout, PlanRecord, StateView, WindowLayout, lay_out
from lightning_moe_ckpt.storage import RecordEntry, RecordRows, SegmentLayout, Span, dtype_code
from lightning_moe_ckpt.storage._entries import _row

AWKWARD = ['qu"ote', "back\\slash", "ünï", "per%cent{}", "line\nfeed", "\U0001f600", "a/b", " ", "__pad__"]


def model() -> nn.Module:
    root = nn.Module()
    root.add_module("moe", MoELayer(4, 8, 3))
    for index, name in enumerate(AWKWARD):
        inner = nn.Module()
        inner.register_parameter(
            name, nn.Parameter(torch.zeros(index + 1, 3, dtype=[torch.float32, torch.bfloat16][index % 2]))
        )
        inner.register_buffer(f"{name}.buffer".replace(".", "-"), torch.zeros(index, dtype=torch.int64))
        root.add_module(name, inner)
    return root


def window(*, stepped: bool, world_size: int = 1) -> WindowLayout:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    if stepped:
        first = next(iter(module.parameters()))
        first.grad = torch.zeros_like(first)
        optimizer.step()
    view = StateView(module, discover(module), StateSchema.of(optimizer), {"moe.router.weight": torch.bfloat16})
    names = all_names(view.operators)
    record = PlanRecord(plan=Plan.of_slots([names[::2], names[1::2]]), config={})
    return lay_out(record, view, ParallelGroups(world_size=world_size), 4096)


def pads_of(layout: SegmentLayout) -> dict[str, Span]:
    """Return what fills the lines of 64 bytes behind tensors."""
    gaps = [(start + nbytes, -nbytes % layout.align) for start, nbytes in layout.places]
    pads = [Span(stop, gap, torch.uint8, (gap,)) for stop, gap in gaps if gap]
    return {f"__pad__.{number}": pad for number, pad in enumerate(pads)}


def header_by_json(layout: SegmentLayout) -> bytes:
    """As the encoder of the standard library spells a table of all tensors."""
    places = sorted(
        [*layout.spans.items(), *pads_of(layout).items()], key=lambda item: (item[1].offset, item[1].nbytes)
    )
    start = len(layout.header)
    table: dict[str, object] = {
        "__metadata__": dict(sorted({"segment_format": "1", "segment_align": "64", **layout.metadata}.items()))
    }
    for name, span in places:
        offsets = [span.offset - start, span.offset - start + span.nbytes]
        table[name] = {"dtype": dtype_code(span.dtype), "shape": list(span.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % 4096)
    return struct.pack("<Q", len(text)) + text


def line_by_json(layout: WindowLayout, step: int, has_state: Mapping[str, bool], digests: list[str]) -> bytes:
    file, rows = layout.steps[step].durable, []
    for field in file.table.fields:
        piece, span = field.shard.slice, file.segment.spans[field.name]
        whole = (piece.global_shape, piece.global_start, piece.numel) if field.shape is None else ((), 0, 1)
        there = field.key in {"param", "present"} or has_state[piece.fqn]
        place = (span.offset, span.nbytes)
        rows.append(
            [
                field.name,
                field.shard.operator,
                field.shard.kind.value,
                piece.fqn,
                field.key,
                dtype_code(field.dtype),
                *whole,
                *place,
                there,
            ]
        )
    for name, span in file.segment.spans.items():
        if name.startswith("buffer/") or name == "journal":
            kind, _, fqn = name.partition("/")
            rows.append(
                [
                    name,
                    "",
                    kind,
                    fqn,
                    "",
                    dtype_code(span.dtype),
                    span.shape,
                    0,
                    torch.Size(span.shape).numel(),
                    span.offset,
                    span.nbytes,
                    True,
                ]
            )
    value = {"digests": digests, "rows": rows}
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


@pytest.mark.parametrize("world_size", [1, 3])
def test_headers_are_spelled_as_by_the_json_encoder(world_size: int) -> None:
    for step in window(stepped=False, world_size=world_size).steps:
        layout = step.durable.segment
        assert layout.header == header_by_json(layout)
        assert SegmentLayout.of_header(layout.header).spans == layout.spans


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("stepped", [False, True])
def test_rows_are_spelled_as_by_the_json_encoder(world_size: int, *, stepped: bool) -> None:
    """Of parameters with optimizer state and without."""
    layout = window(stepped=stepped, world_size=world_size)
    view = layout.steps[0].view
    has_state = {fqn: view.schema.has_state(param) for fqn, param in view.params.items()}
    assert any(has_state.values()) == stepped
    assert not all(has_state.values())
    for number, step in enumerate(layout.steps):
        data = memoryview(bytearray(step.durable.segment.nbytes))
        table = RecordRows(partial(step.durable.records, has_state)).digested_with_file(data)[0]
        assert table.line == line_by_json(layout, number, has_state, [record.digest for record in table])
        assert all(isinstance(record, RecordEntry) and len(astuple(record)) == 14 for record in table)


def test_boxes_are_spelled_as_the_encoder_does() -> None:
    """Tensors by element have the box in their rows and all in their names; scalars are as ever."""
    file = window(stepped=True).steps[0].durable
    box = ((0, 1), (2, 2))

    def in_box(shard: Shard) -> Shard:
        piece = shard.slice
        return shard._replace(slice=replace(piece, box=box, stop=piece.start + 4)) if "ünï" in piece.fqn else shard

    shards = {region: list(map(in_box, shards)) for region, shards in file.shards.items()}
    rows, places = FileLayout(shards, file.view, file.groups, None).records(defaultdict(lambda: True))
    found = [*RecordRows(lambda: (rows, places)).columns.entries()]
    assert rows.decode() == f"[{','.join(map(_row, found))}]"
    boxed = [record for record in found if record.box]
    assert {record.box for record in boxed} == {box}
    assert {record.state_key for record in boxed} == {"param", "exp_avg", "exp_avg_sq"}
    assert all(f"+{record.numel}@0,1:2,2/" in record.name for record in boxed)
    assert len({record.name for record in found}) == len(found)
