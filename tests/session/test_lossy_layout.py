"""Layouts of lossy generations: what lies where, alike on all ranks, in one file or in one within another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from session._lossy_model import NUM_EXPERTS, rank_of_world

from lightning_moe_ckpt.errors import IdentityMismatch
from lightning_moe_ckpt.native import create_engine
from lightning_moe_ckpt.parallel import set_current_groups
from lightning_moe_ckpt.policies import assign_writers
from lightning_moe_ckpt.session import _lossy_layout
from lightning_moe_ckpt.session._layout import Part, WindowLayout, as_memoryview
from lightning_moe_ckpt.session._lossy_layout import expert_loads
from lightning_moe_ckpt.session._lossy_plan import (
    Experts,
    LossyRecord,
    experts_of,
    lossy_record,
    memory_flavour,
    storage_flavour,
)
from lightning_moe_ckpt.session._planning import lay_out
from lightning_moe_ckpt.session._sealed import SealedSegment
from lightning_moe_ckpt.session._writer import BoundaryCapture, SegmentWriter
from lightning_moe_ckpt.storage import GenerationId, SegmentEntry, SegmentLayout, digest_of, verify_records

WORLDS = [(1, 1), (3, 1), (4, 2), (3, 3)]
"""Ranks, and over how many of them the experts are spread."""
CONFIG = {"kind": "partial"}
JOURNAL_NBYTES = 4096
SELECTIONS: list[Experts] = [((0, 5), (7,)), ((11, 0), (2, 7)), (tuple(range(NUM_EXPERTS)),) * 2, ((), (3,))]


@pytest.fixture(autouse=True)
def _groups() -> Iterator[None]:
    yield
    set_current_groups(None)


def layouts(record: LossyRecord, world_size: int, ep_size: int) -> list[WindowLayout]:
    """Of all ranks."""
    return [lay_out(record, *rank_of_world(r, world_size, ep_size), JOURNAL_NBYTES) for r in range(world_size)]


def own_parts(layout: WindowLayout) -> list[Part]:
    (slot,) = layout.slots
    return [part for parts in slot.parts.values() for part in parts if part.writer == slot.groups.rank]


@pytest.mark.parametrize(("world_size", "ep_size"), WORLDS)
@pytest.mark.parametrize("experts", SELECTIONS)
def test_every_element_that_a_plan_takes_has_one_writer(world_size: int, ep_size: int, experts: Experts) -> None:
    """Over all ranks: the dense part and the selected experts, each element once, and nothing of other experts."""
    taken: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    every = layouts(lossy_record(CONFIG, experts, experts), world_size, ep_size)
    for layout in every:
        for part in own_parts(layout):
            taken[part.operator].append((part.piece.fqn, part.piece.global_start, part.piece.numel))
    view, _ = rank_of_world(0, 1, 1)
    layers = [layer.fqn for layer in view.operators.layers]
    wanted = {
        op.name: sum(piece.numel for piece in op.slices)
        for op in view.operators
        if op.expert_idx is None or op.expert_idx in experts[layers.index(str(op.layer))]
    }
    assert {name: sum(numel for *_, numel in pieces) for name, pieces in taken.items()} == wanted
    for pieces in taken.values():
        for (fqn, start, numel), (other, after, _) in pairwise(sorted(pieces)):
            assert fqn != other or start + numel <= after


@pytest.mark.parametrize(("world_size", "ep_size"), WORLDS)
def test_a_ranks_piece_of_an_expert_is_the_same_in_every_generation(world_size: int, ep_size: int) -> None:
    """Whatever else is taken, and at whatever level."""
    pieces: dict[tuple[int, str], set[frozenset[Part]]] = defaultdict(set)
    records = [lossy_record(CONFIG, memory, SELECTIONS[0]) for memory in SELECTIONS[2:3]]
    records += [lossy_record(CONFIG, experts, experts) for experts in SELECTIONS]
    for record in [*records, storage_flavour(records[0])]:
        for rank, layout in enumerate(layouts(record, world_size, ep_size)):
            by_operator = defaultdict(set)
            for part in own_parts(layout):
                by_operator[part.operator].add(part)
            for name, parts in by_operator.items():
                if "/expert." in name:
                    pieces[rank, name].add(frozenset(parts))
    assert len(pieces) >= 2 * NUM_EXPERTS
    assert all(len(found) == 1 for found in pieces.values())


@pytest.mark.parametrize(("world_size", "ep_size"), WORLDS)
def test_ranks_agree_on_what_each_of_them_writes(world_size: int, ep_size: int) -> None:
    """Also of experts they do not hold: else the dense part would be shared out differently."""
    experts: Experts = ((0, 5), (7, 2, 3))
    said = [expert_loads(*rank_of_world(r, world_size, ep_size), experts) for r in range(world_size)]
    assert all(loads == said[0] for loads in said)
    for rank, layout in enumerate(layouts(lossy_record(CONFIG, experts, experts), world_size, ep_size)):
        (slot,) = layout.slots
        mine = [part for part in own_parts(layout) if "/expert." in part.operator]
        assert said[0][rank] == sum(p.piece.numel * slot.view.bytes_per_element(p.piece.fqn, p.kind) for p in mine)


@pytest.mark.parametrize(("world_size", "ep_size"), WORLDS)
def test_the_file_of_storage_is_part_of_the_memory_byte_for_byte(world_size: int, ep_size: int) -> None:
    """Storage needs no copy: what memory holds contains the file that a plan of storage alone would write."""
    record = lossy_record(CONFIG, SELECTIONS[2], SELECTIONS[0])
    for rank in range(world_size):
        view, groups = rank_of_world(rank, world_size, ep_size)
        outer, alone = (lay_out(each, view, groups, JOURNAL_NBYTES) for each in (record, storage_flavour(record)))
        assert outer.persisted is not None
        assert (outer.persisted.plan_hash, outer.persisted.plan_json) == (alone.plan_hash, alone.plan_json)
        inside, file = _captured(outer), _captured(alone)
        inner = outer.slots[0].persisted_bytes(inside)
        assert torch.equal(inner, file)
        assert inner.data_ptr() % 4096 == inside.data_ptr() % 4096
        assert SegmentLayout.parse(as_memoryview(inner.clone())).header == alone.slots[0].segment.header
        assert SegmentLayout.parse(as_memoryview(inside)).header == outer.slots[0].segment.header
        assert inside.numel() > file.numel()
        outer_entry, inner_entry = _sealed(outer)
        assert inner_entry.digest == digest_of(as_memoryview(inner))
        verify_records(inner_entry, as_memoryview(inner))
        verify_records(outer_entry, as_memoryview(inside))


def _captured(layout: WindowLayout) -> torch.Tensor:
    """What memory of a generation holds."""
    return _capture(layout)[0]


def _sealed(layout: WindowLayout) -> tuple[SegmentEntry, SegmentEntry]:
    """What markers say of a segment, and of the file within it."""
    _, segment = _capture(layout)
    assert segment.persisted is not None
    inner = segment.persisted.digested()  # storage may come first
    return segment.digested(), inner


def _capture(layout: WindowLayout) -> tuple[torch.Tensor, SealedSegment]:
    (slot,) = layout.slots
    memory = torch.full((slot.segment.nbytes,), 255, dtype=torch.uint8)
    engine = create_engine(torch.device("cpu"))
    writer = SegmentWriter(slot, memory, engine)
    memory[slot.segment.spans["journal"].offset :][:JOURNAL_NBYTES] = 0
    _zero_absent(slot.segment, memory)
    capture = BoundaryCapture(writer, 3, {})
    capture.take_rest({}, disturbed=False)
    sealed = capture.sealed(GenerationId(step=3, epoch=1))
    sealed.wait()
    engine.close()
    return memory, sealed


def _zero_absent(segment: SegmentLayout, memory: torch.Tensor) -> None:
    """The optimizer has no state yet; what is reserved for it is not written."""
    for name in segment.spans:
        if name.endswith(("exp_avg", "exp_avg_sq", "/step")):
            segment.view(memory, name).zero_()


def test_adaptive_sharding_lowers_the_largest_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank whose experts are taken writes less of the dense part; what all write together stays the same."""
    experts: Experts = ((0,), (6,))
    found = {}
    for name in ("adaptive", "equal"):
        if name == "equal":
            monkeypatch.setattr(_lossy_layout, "assign_adaptively", lambda *each: assign_writers(each[0], each[1]))
        found[name] = [
            sum(part.piece.numel for part in own_parts(layout))
            for layout in layouts(lossy_record(CONFIG, experts, experts), 4, 4)
        ]
    print({name: max(sizes) for name, sizes in found.items()})
    assert sum(found["adaptive"]) == sum(found["equal"])
    assert max(found["adaptive"]) < max(found["equal"])


def test_either_flavour_tells_the_other() -> None:
    """A rank that finds a generation in memory knows what it is called in storage, and the other way round."""
    record = lossy_record(CONFIG, SELECTIONS[2], SELECTIONS[0])
    stored = storage_flavour(record)
    assert stored != record
    assert stored["family"] == record["family"]
    assert (memory_flavour(stored), storage_flavour(stored)) == (record, stored)
    assert (experts_of(record), experts_of(stored)) == (SELECTIONS[2], SELECTIONS[0])
    alike = lossy_record(CONFIG, SELECTIONS[0], SELECTIONS[0])
    assert storage_flavour(alike) != alike, "what is stored borrows, so its markers differ even then"


def test_a_plan_for_other_experts_is_refused() -> None:
    """Of layers or experts that the model does not have."""
    view, groups = rank_of_world(0, 1, 1)
    for experts in [((0,),), ((0,), (NUM_EXPERTS,))]:
        with pytest.raises(IdentityMismatch, match="takes experts"):
            lay_out(lossy_record(CONFIG, experts, experts), view, groups, JOURNAL_NBYTES)
