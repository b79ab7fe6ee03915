"""Tensors whose parts are boxes, cut by any mesh, are put together again, and what does not fit is named."""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.inspection._assemble import Assembler, shared_element
from lightning_moe_ckpt.inspection._verify import disagreements
from lightning_moe_ckpt.journal import encode_journal
from lightning_moe_ckpt.storage import (
    Bounds,
    GenerationId,
    RankMarker,
    RecordEntry,
    SegmentEntry,
    SegmentLayout,
    TensorSpec,
    digest_of,
    dtype_code,
    segment_key,
)
from lightning_moe_ckpt.storage._fsspec import FsspecBackend

GENERATION = GenerationId(step=4, incarnation=1, nonce="c" * 12)
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]


@dataclass
class Part:
    """What one rank stores of a tensor: elements `[start, stop)` of a box, or of the whole if that has no box."""

    box: Bounds | None
    start: int
    stop: int


def view_of(whole: Tensor, box: Bounds) -> Tensor:
    """A box of a tensor, in memory of its own."""
    return whole[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))].contiguous()


def chunks(length: int, number: int) -> list[tuple[int, int]]:
    """Offset and size of each of `torch.chunk`'s chunks; the last ones may be empty."""
    each = -(-length // number)
    ends = [min(length, each * i) for i in range(number + 1)]
    return [(start, stop - start) for start, stop in pairwise(ends)]


def parts_of(shape: Sequence[int], draw: random.Random) -> list[Part]:
    """Cut a tensor along the dimensions of a mesh, then each box among the ranks that hold it."""
    boxes: list[Bounds] = [((0,) * len(shape), tuple(shape))]
    for _ in range(draw.randint(0, 3)):
        dim, number = draw.randrange(len(shape)), draw.randint(1, 4)
        cut: list[Bounds] = []
        for offset, size in boxes:
            for first, length in chunks(size[dim], number):
                at, left = list(offset), list(size)
                at[dim], left[dim] = offset[dim] + first, length
                cut.append((tuple(at), tuple(left)))
        boxes = cut
    found: list[Part] = []
    for offset, size in boxes:
        is_flat = size[1:] == tuple(shape[1:])
        numel, first = math.prod(size), offset[0] * math.prod(shape[1:]) if is_flat else 0
        bounds = sorted([0, numel, *(draw.randint(0, numel) for _ in range(draw.randint(0, 2)))])
        found += [Part(None if is_flat else (offset, size), first + a, first + b) for a, b in pairwise(bounds)]
    draw.shuffle(found)
    return found


@dataclass
class Stored:
    """A generation of several ranks, in memory."""

    backend: FsspecBackend = field(default_factory=lambda: FsspecBackend(f"memory://{uuid.uuid4().hex}/run"))
    markers: list[RankMarker] = field(default_factory=list)

    def add_rank(self, tensors: dict[str, tuple[Tensor, Part]], step: float) -> None:
        """Store parts of tensors of `w`, by state key, a scalar, and a journal."""
        rank = len(self.markers)
        values = {"present": torch.ones(1, dtype=torch.uint8), "step": torch.tensor([step])}
        for key, (whole, part) in tensors.items():
            values[key] = (whole if part.box is None else view_of(whole, part.box)).reshape(-1)[part.start : part.stop]
        values["journal"] = torch.frombuffer(bytearray(encode_journal({}, 64).ljust(64, b"\0")), dtype=torch.uint8)
        layout = SegmentLayout(
            [TensorSpec(key, each.dtype, tuple(each.shape)) for key, each in values.items()], metadata={}
        )
        segment_U8 = torch.zeros(layout.nbytes, dtype=torch.uint8)
        layout.write_header(segment_U8)
        for key, each in values.items():
            layout.view(segment_U8, key).copy_(each)
        data, file = segment_U8.numpy().tobytes(), segment_key(GENERATION, rank, 4)
        records: list[RecordEntry] = []
        for key, span in layout.spans.items():
            facts: dict[str, Any] = {"kind": "full", "operator": "net", "fqn": "w", "state_key": key}
            facts |= {"global_shape": (), "global_start": 0, "numel": math.prod(span.shape)}
            if key in tensors:
                whole, part = tensors[key]
                facts |= {"global_shape": tuple(whole.shape), "global_start": part.start, "box": part.box}
            if key == "journal":
                facts |= {"kind": key, "operator": "", "fqn": "", "state_key": "", "global_shape": span.shape}
            facts |= {"offset": span.offset, "nbytes": span.nbytes}
            digest = digest_of(data[span.offset : span.offset + span.nbytes])
            records.append(RecordEntry(name=key, dtype=dtype_code(span.dtype), digest=digest, **facts))
        self.backend.put(file, data)
        entry = SegmentEntry(step=4, key=file, nbytes=len(data), digest=digest_of(data), records=tuple(records))
        marker = RankMarker(
            run_id="r", rank=rank, world_size=1000, generation=GENERATION, plan_hash="p", segments=(entry,),
            policy={"name": "dense"},
        )  # fmt: skip
        self.markers.append(RankMarker.from_bytes(marker.to_bytes(), "here"))

    def read(self) -> dict[str, Tensor]:
        """What an export has."""
        tensors = Assembler(self.backend, self.markers)
        return {"w": tensors.read("w"), **{name: each.read() for name, each in tensors.optimizer().items()}}

    def change(self, rank: int, change: Callable[[RecordEntry], RecordEntry | None]) -> None:
        """Change a rank's records, or take them away."""
        (entry,) = self.markers[rank].segments
        records = tuple(new for record in entry.records if (new := change(record)) is not None)
        self.markers[rank] = replace(self.markers[rank], segments=(replace(entry, records=records),))


def stored_by(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> tuple[Stored, dict[str, Tensor]]:
    """A generation of ranks with random parts of a parameter and its moment, and what they make together."""
    draw, stored = random.Random(seed), Stored()  # cases, not secrets
    values = torch.randint(0, 120, tuple(shape), generator=torch.Generator().manual_seed(seed))
    weight, moment = values.to(dtype), (values * 3).to(torch.float64)
    for part in parts_of(shape, draw):
        stored.add_rank({"param": (weight, part), "exp_avg": (moment, part)}, step=7.0)
    return stored, {"w": weight, "w/exp_avg": moment, "w/step": torch.tensor(7.0)}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """By shape, dtype and bits."""
    return found.keys() == expected.keys() and all(
        (each.shape, each.dtype) == (expected[name].shape, expected[name].dtype)
        and torch.equal(each.reshape(-1).view(torch.uint8), expected[name].reshape(-1).view(torch.uint8))
        for name, each in found.items()
    )


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4)
seeds = st.integers(0, 10**6)


@settings(max_examples=60, deadline=None)
@given(shapes, seeds, st.sampled_from(DTYPES))
def test_boxes_of_any_mesh_are_the_tensor(shape: list[int], seed: int, dtype: torch.dtype) -> None:
    """Rows, columns and both, uneven and empty chunks, boxes that several ranks share; scalars are every rank's."""
    stored, expected = stored_by(shape, seed, dtype)
    assert disagreements(stored.markers) == []
    assert same(stored.read(), expected)


@settings(max_examples=60, deadline=None)
@given(shapes, seeds)
def test_an_element_that_is_missing_or_twice_there_is_found(shape: list[int], seed: int) -> None:
    """Of a tensor in which at least one rank has a box: a rank's records are gone, or another rank has others for their place."""
    stored, _ = stored_by(shape, seed)
    records = [record for marker in stored.markers for record in marker.segments[0].records]
    if not any(record.box for record in records):
        return
    full = next(marker.rank for marker in stored.markers if marker.segments[0].records[2].numel)
    twice, gone = Stored(stored.backend, list(stored.markers)), Stored(stored.backend, list(stored.markers))
    twice.markers.append(twice.markers[full])
    assert disagreements(twice.markers) == []
    twice.read()
    twice.change(len(twice.markers) - 1, lambda record: replace(record, digest="0" * 32))
    gone.change(full, lambda record: None if record.state_key == "exp_avg" else record)
    assert [each[:8] for each in disagreements(twice.markers)] == ["`w/exp_a", "`w`: ele"]
    with pytest.raises(ConfigurationError, match="was written by two ranks"):
        twice.read()
    (reason,) = disagreements(gone.markers)
    assert reason.startswith("`w/exp_avg`: ")
    assert reason.endswith(f" of {math.prod(shape)} elements are nowhere stored")
    with pytest.raises(ConfigurationError, match="nobody wrote elements"):
        gone.read()


def grid() -> Stored:
    """Four ranks with a quarter each of a matrix."""
    stored, whole = Stored(), torch.arange(24.0).view(4, 6)
    for offset in ((0, 0), (0, 3), (2, 0), (2, 3)):
        stored.add_rank({"param": (whole, Part((offset, (2, 3)), 0, 6))}, step=1.0)
    return stored


def test_a_box_in_the_place_of_its_neighbour_is_named() -> None:
    """As many elements as there should be, some of them twice."""
    stored = grid()
    assert disagreements(stored.markers) == []
    stored.change(3, lambda record: replace(record, box=((1, 3), (2, 3))) if record.box else record)
    assert disagreements(stored.markers) == ["`w`: element [1, 3] is stored twice"]
    with pytest.raises(ConfigurationError, match=r"element \(1, 3\) was written by two ranks"):
        stored.read()


def test_ranks_that_disagree_on_a_scalar_are_named() -> None:
    """Each writes it beside its part."""
    stored, whole = Stored(), torch.arange(4.0)
    for rank in range(2):
        stored.add_rank({"param": (whole, Part(None, 2 * rank, 2 * rank + 2))}, step=float(rank))
    with pytest.raises(ConfigurationError, match=r"`w/step` differs between ranks \(0.0, 1.0\)"):
        stored.read()


def test_ranks_that_disagree_on_the_shape_are_named_once() -> None:
    """Boxes of different dimensions are not compared."""
    stored = grid()
    flat = torch.arange(24.0).view(2, 2, 6)
    stored.markers.pop()
    stored.add_rank({"param": (flat, Part(((0, 0, 0), (1, 2, 3)), 0, 6))}, step=1.0)
    (reason,) = disagreements(stored.markers)
    assert "say [2, 2, 6] F32 and [4, 6] F32" in reason


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_an_interval_is_made_of_few_boxes(size: list[int], data: st.DataObject) -> None:
    """In the order of the elements; no more than two for each dimension but one."""
    shape = tuple(length + 2 for length in size)
    numbers = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, math.prod(size)))
    stop = data.draw(st.integers(start, math.prod(size)))
    box = (tuple(1 for _ in size), tuple(size))
    record = replace(grid().markers[0].segments[0].records[0], global_shape=shape, box=box)
    found = list(replace(record, global_start=start, numel=stop - start).boxes())
    elements = [numbers[:0].reshape(-1), *(view_of(numbers, each).reshape(-1) for each in found)]
    assert torch.equal(torch.cat(elements), view_of(numbers, box).reshape(-1)[start:stop])
    assert len(found) <= 2 * len(size) - 1
    assert all(math.prod(length) for _, length in found)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(*[st.tuples(st.integers(0, 4), st.integers(1, 3))] * 2), max_size=5))
def test_an_element_in_two_boxes_is_found(places: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    """If any is: counted one by one."""
    count = torch.zeros(7, 7, dtype=torch.int64)
    for (row, rows), (column, columns) in places:
        count[row : row + rows, column : column + columns] += 1
    boxes: list[Bounds] = [((row, column), (rows, columns)) for (row, rows), (column, columns) in places]
    found = shared_element(boxes)
    assert (found is None) == (int(count.max()) < 2)
    if found is not None:
        assert int(count[found]) > 1
