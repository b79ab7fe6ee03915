"""Layouts of partial generations: what lies where, alike on all ranks, in one file or in one within another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from snapshot._partial_model import NUM_EXPERTS, rank_of_world
from stored._segments import verify_records

from lightning_moe_ckpt.errors import IdentityMismatch
from lightning_moe_ckpt.native import create_engine
from lightning_moe_ckpt.operators import RecordKind
from lightning_moe_ckpt.parallel import ParallelGroups, set_current_groups
from lightning_moe_ckpt.policies import Experts, Plan, Selection, WindowStep, assign_writers, expert_names
from lightning_moe_ckpt.snapshot import (
    BoundaryCapture,
    PlanRecord,
    SegmentWriter,
    Shard,
    StateView,
    WindowLayout,
    _lay_out,
    dense_nbytes,
    lay_out,
    record_nbytes,
)
from lightning_moe_ckpt.snapshot._lay_out import expert_loads
from lightning_moe_ckpt.storage import GenerationId, SegmentLayout, digest_of
from lightning_moe_ckpt.tiers import SealedSegment

WORLDS = [(1, 1), (3, 1), (4, 2), (3, 3)]
"""Ranks, and over how many of them the experts are spread."""
JOURNAL_NBYTES = 4096
SELECTIONS: list[Experts] = [((0, 5), (7,)), ((0, 11), (2, 7)), (tuple(range(NUM_EXPERTS)),) * 2, ((), (3,))]


@pytest.fixture(autouse=True)
def _groups() -> Iterator[None]:
    yield
    set_current_groups(None)


def layout_of(here: tuple[StateView, ParallelGroups], memory: Experts, storage: Experts) -> WindowLayout:
    """Of one rank, under a plan that takes these experts."""
    view, groups = here
    record = PlanRecord(plan=Selection(memory, storage).plan(view.operators), config={})
    return lay_out(record, view, groups, JOURNAL_NBYTES)


def layouts(memory: Experts, storage: Experts, world_size: int, ep_size: int) -> list[WindowLayout]:
    """Of all ranks."""
    return [layout_of(rank_of_world(rank, world_size, ep_size), memory, storage) for rank in range(world_size)]


def own_parts(layout: WindowLayout) -> list[Shard]:
    (step,) = layout.steps
    everything = [part for file in step.files for parts in file.shards.values() for part in parts]
    return [part for part in everything if part.writer == step.groups.rank]


@pytest.mark.parametrize(("world_size", "ep_size"), WORLDS)
@pytest.mark.parametrize("experts", SELECTIONS)
def test_every_element_that_a_plan_takes_has_one_writer(world_size: int, ep_size: int, experts: Experts) -> None:
    """Over all ranks: the dense part and the selected experts, each element once, and nothing of other experts."""
    taken: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    every = layouts(experts, experts, world_size, ep_size)
    for layout in every:
        for part in own_parts(layout):
            taken[part.operator].append((part.slice.fqn, part.slice.global_start, part.slice.numel))
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
    """Whatever else is taken, and in whatever file."""
    pieces: dict[tuple[int, str], set[frozenset[Shard]]] = defaultdict(set)
    for taken in [(SELECTIONS[2], SELECTIONS[0]), *((selection, selection) for selection in SELECTIONS)]:
        for rank, layout in enumerate(layouts(*taken, world_size, ep_size)):
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
    experts: Experts = ((0, 5), (2, 3, 7))
    said = []
    for rank in range(world_size):
        view, groups = rank_of_world(rank, world_size, ep_size)
        rows = zip(view.operators.layers, experts, strict=True)
        said.append(expert_loads(view, groups, [expert_names(layer)[i] for layer, row in rows for i in row]))
    assert all(loads == said[0] for loads in said)
    for rank, layout in enumerate(layouts(experts, experts, world_size, ep_size)):
        (step,) = layout.steps
        mine = [part for part in own_parts(layout) if "/expert." in part.operator]
        assert said[0][rank] == sum(p.slice.numel * step.view.bytes_per_element(p.slice.fqn, p.kind) for p in mine)


@pytest.mark.parametrize(("world_size", "ep_size"), WORLDS)
def test_two_files_lie_one_behind_the_other(world_size: int, ep_size: int) -> None:
    """Storage needs no copy: the first file in memory is the one that a plan without the second would write."""
    for rank in range(world_size):
        here = rank_of_world(rank, world_size, ep_size)
        both, alone = layout_of(here, SELECTIONS[2], SELECTIONS[0]), layout_of(here, SELECTIONS[0], SELECTIONS[0])
        memory, segment = _capture(both)
        file, _ = _capture(alone)
        durable, node = segment.files
        assert [each.audience for each in segment.files] == ["durable", "node"]
        assert torch.equal(memory[: durable.view.nbytes], file)
        assert memory.numel() == segment.view.nbytes == durable.view.nbytes + node.view.nbytes
        for each, layout in zip(segment.files, both.steps[0].files, strict=True):
            entry = each.digested()
            assert SegmentLayout.parse(memoryview(bytes(each.view))).header == layout.segment.header
            assert entry.digest == digest_of(each.view)
            verify_records(entry, each.view)
        taken = [{record.operator for record in each.digested().records} - {""} for each in segment.files]
        assert not any("/expert." not in name for name in taken[1])
        assert not taken[0] & taken[1]
        assert both.missing == frozenset(
            name for name in both.steps[0].view.operators.names if "/expert." in name
        ) - taken_of(SELECTIONS[0], both)
        assert segment.of({"durable"}).view.nbytes == durable.view.nbytes


def taken_of(experts: Experts, layout: WindowLayout) -> frozenset[str]:
    layers = layout.steps[0].view.operators.layers
    return frozenset(expert_names(layer)[i] for layer, row in zip(layers, experts, strict=True) for i in row)


def _capture(layout: WindowLayout) -> tuple[torch.Tensor, SealedSegment]:
    (step,) = layout.steps
    memory = torch.full((step.files_nbytes,), 255, dtype=torch.uint8)
    engine = create_engine(torch.device("cpu"))
    writer = SegmentWriter(step, memory, engine)
    memory[step.durable.segment.spans["journal"].offset :][:JOURNAL_NBYTES] = 0
    for file in step.files:
        _zero_absent(file.segment, file.bytes_in(memory))
    capture = BoundaryCapture(writer, 3, {})
    capture.take_rest({}, disturbed=False)
    sealed = capture.sealed(GenerationId(step=3, incarnation=1, nonce="0123456789ab"))
    for each in sealed.files:
        each.wait()
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
            monkeypatch.setattr(_lay_out, "assign_adaptively", lambda *each: assign_writers(each[0], each[1], each[2]))
        found[name] = [
            sum(part.slice.numel for part in own_parts(layout)) for layout in layouts(experts, experts, 4, 4)
        ]
    print({name: max(sizes) for name, sizes in found.items()})
    assert sum(found["adaptive"]) == sum(found["equal"])
    assert max(found["adaptive"]) < max(found["equal"])


def test_a_plan_tells_which_experts_it_takes() -> None:
    """And whether some are for memory only."""
    operators = rank_of_world(0, 1, 1)[0].operators
    for memory, storage in [(SELECTIONS[2], SELECTIONS[0]), (SELECTIONS[0], SELECTIONS[0]), (SELECTIONS[3], ((), ()))]:
        plan = Selection(memory, storage).plan(operators)
        assert Selection.of_plan(plan, operators) == Selection(memory, storage)
        assert ("node" in plan.steps[0].files) == (memory != storage)


def test_a_plan_for_other_experts_is_refused() -> None:
    """Of layers or experts that the model does not have."""
    view, groups = rank_of_world(0, 1, 1)
    names = Selection(SELECTIONS[0], SELECTIONS[0]).plan(view.operators).names
    for wrong in [(*names, "model.moe/expert.99"), names[1:]]:
        plan = Plan((WindowStep({"durable": dict.fromkeys(wrong, RecordKind.FULL)}),), partial=True)
        with pytest.raises(IdentityMismatch, match="other operators than this model has"):
            lay_out(PlanRecord(plan=plan, config={}), view, groups, JOURNAL_NBYTES)


def test_a_rank_writes_a_share_of_its_own_stage_and_of_no_other() -> None:
    """By hand: FULL records of AdamW have 12 bytes and a step of 4 per tensor, in two stages of two ranks as in a world of two."""
    view, _ = rank_of_world(0, 2, 2)
    stages = [ParallelGroups.placed(rank, 4, ep_size=2, num_stages=2) for rank in range(4)]
    dense = [op for op in view.operators if op.expert_idx is None]
    experts = [op for op in view.operators if op.expert_idx is not None]
    numel = {op.name: sum(piece.numel for piece in op.slices) for op in view.operators}
    for groups in stages:
        assert record_nbytes(view, groups) == {
            **{op.name: (-(-12 * numel[op.name] // 2), -(-4 * numel[op.name] // 2)) for op in dense},
            **{op.name: (12 * numel[op.name], 4 * numel[op.name]) for op in experts},
        }
        assert dense_nbytes(view, groups) == sum(full for full, _ in record_nbytes(view, groups).values())
        taken = expert_names(view.operators.layers[0])
        # Half of a layer's experts lie at each expert-parallel position, and one rank of the stage is at each.
        whole = sum(12 * numel[name] for name in taken if name in numel)
        first = 2 * groups.stage
        assert expert_loads(view, groups, taken) == {
            rank: whole if rank in (first, first + 1) else 0 for rank in range(4)
        }
