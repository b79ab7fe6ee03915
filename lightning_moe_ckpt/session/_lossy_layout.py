"""Where the bytes of a lossy generation lie: all of the dense part, and the experts that its plan takes.

An expert's pieces are cut between its holders whatever else is taken, so a rank's piece of an expert has the same
coordinates in every generation, and a reader can put a state together from several. Dense operators and routers are
whole in every generation, so their pieces may move: they go to the ranks with fewest bytes, experts included.

Source: PEC/MoC (2024), Sec. 3.2 (adaptive data-parallel sharding).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_moe_ckpt.operators import Operator, RecordKind
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.policies import MEMORY, STORAGE, RecordPiece, assign_adaptively, assign_writers
from lightning_moe_ckpt.session._layout import REGIONS, Part, SlotLayout, StateView, WindowLayout
from lightning_moe_ckpt.session._lossy_budgets import SlotSizes
from lightning_moe_ckpt.session._lossy_plan import (
    Experts,
    LossyRecord,
    check_experts,
    experts_of,
    has_two_levels,
    lossy_record,
    peer_flavour,
    storage_flavour,
)

EXPERT_SPLIT_NBYTES = 4 * 2**10
"""Slices of an expert of this many bytes or more are cut between its holders."""

Parts = dict[str, list[Part]]
"""By region, over all its writers, in the order in which they are stored."""


def lossy_layout(record: LossyRecord, view: StateView, groups: ParallelGroups, journal_nbytes: int) -> WindowLayout:
    """Make a stored or fresh lossy plan concrete on this rank.

    Args:
        record: at either level: that of memory holds the file of storage, where they differ.
        view: live state.
        groups: this rank's place.
        journal_nbytes: capacity of the journal record.

    Raises:
        IdentityMismatch: the plan is for other experts.
    """
    check_experts(record, view.operators)
    chosen = experts_of(record, "storage")
    dense = dense_parts(view, groups, expert_loads(view, groups, chosen))
    slot = SlotLayout(_merged(dense, expert_parts(view, groups, chosen)), view, groups, journal_nbytes)
    persisted = WindowLayout.of(storage_flavour(record), slot)
    peers = WindowLayout.of(peer_flavour(record), slot)
    if record["level"] != "memory":
        return persisted if record["level"] == "storage" else peers
    if not has_two_levels(record):
        return WindowLayout.of(record, slot, persisted=persisted, peers=peers)
    others = expert_parts(view, groups, _without(experts_of(record, "memory"), chosen))
    outer = SlotLayout(others, view, groups, journal_nbytes, persisted=slot)
    return WindowLayout.of(record, outer, persisted=persisted, peers=peers)


class SlotMeasure:
    """`slot_sizes` of one rank, made once per capacity of the journal.

    Args:
        view: live state.
        groups: this rank's place.
    """

    def __init__(self, view: StateView, groups: ParallelGroups) -> None:
        self._view, self._groups = view, groups
        self._known: tuple[int, dict[str, SlotSizes]] | None = None

    def sizes(self, journal_nbytes: int) -> dict[str, SlotSizes]:
        """With a journal record of that capacity."""
        if self._known is None or self._known[0] != journal_nbytes:
            self._known = journal_nbytes, slot_sizes(self._view, self._groups, journal_nbytes)
        return self._known[1]


def slot_sizes(view: StateView, groups: ParallelGroups, journal_nbytes: int) -> dict[str, SlotSizes]:
    """What this rank's segments come to at each level, without experts and with all of them."""
    everything = tuple(tuple(range(layer.num_experts)) for layer in view.operators.layers)
    nothing: Experts = tuple(() for _ in everything)

    def slot(memory: Experts, storage: Experts) -> SlotLayout:
        return lossy_layout(lossy_record({}, memory, storage), view, groups, journal_nbytes).slots[0]

    bare, local, remote = slot(nothing, nothing), slot(everything, nothing), slot(everything, everything)
    gradients = remote.nbytes - remote.segment.nbytes
    return {
        level: SlotSizes(bare=bare.segment.nbytes, full=full.segment.nbytes, gradients=gradients)
        for level, full in ((MEMORY, local), (STORAGE, remote))
    }


def expert_parts(view: StateView, groups: ParallelGroups, experts: Experts) -> Parts:
    """Parts of those of the named experts that this rank's regions hold."""
    local = local_experts(view)
    parts: Parts = {region: [] for region in REGIONS}
    for layer, chosen in zip(view.operators.layers, experts, strict=True):
        for expert in chosen:
            operator = local.get((layer.fqn, expert))
            if operator is not None:
                parts[operator.holders] += _parts_of_expert(operator, view, groups)
    return parts


def dense_parts(view: StateView, groups: ParallelGroups, loads: Mapping[int, int]) -> Parts:
    """Parts of everything that is not an expert.

    Args:
        view: live state.
        groups: this rank's place.
        loads: bytes that ranks write besides, by rank.
    """
    parts: Parts = {}
    for region in REGIONS:
        operators = [op for op in view.operators if op.kind != "expert" and op.holders == region]
        pieces = [piece for op in operators for piece in _pieces(op, view)]
        parts[region] = [
            Part(operator=each.record, kind=RecordKind.FULL, piece=each.piece, writer=each.writer)
            for each in assign_adaptively(pieces, _ranks(region, groups), loads)
        ]
    return parts


def expert_loads(view: StateView, groups: ParallelGroups, experts: Experts) -> dict[int, int]:
    """Bytes of the named experts that every rank of the world writes; experts of a layer are equal in size."""
    loads = dict.fromkeys(range(groups.world_size), 0)
    local = local_experts(view)
    for layer, chosen in zip(view.operators.layers, experts, strict=True):
        template = local[layer.fqn, layer.local_expert_ids[0]]
        for expert in chosen:
            holders = _holders(template, groups, expert // len(layer.local_expert_ids))
            for part in _cut(template, view, holders, turn=expert):
                loads[part.writer] += part.piece.numel * view.bytes_per_element(part.piece.fqn, RecordKind.FULL)
    return loads


def local_experts(view: StateView) -> dict[tuple[str, int], Operator]:
    """Experts on this rank by layer and global index."""
    return {
        (op.layer, op.expert_idx): op for op in view.operators if op.layer is not None and op.expert_idx is not None
    }


def _parts_of_expert(operator: Operator, view: StateView, groups: ParallelGroups) -> list[Part]:
    assert operator.expert_idx is not None
    return _cut(operator, view, _ranks(operator.holders, groups), turn=operator.expert_idx)


def _cut(operator: Operator, view: StateView, holders: Sequence[int], *, turn: int) -> list[Part]:
    """Parts of one expert; `turn` decides which holder is the first, so that small pieces do not all go to one."""
    first = turn % len(holders)
    turned = [*holders[first:], *holders[:first]]
    places = assign_writers(_pieces(operator, view), range(len(turned)), split_nbytes=EXPERT_SPLIT_NBYTES)
    return [
        Part(operator=operator.name, kind=RecordKind.FULL, piece=each.piece, writer=turned[each.writer])
        for each in places
    ]


def _holders(expert: Operator, groups: ParallelGroups, position: int) -> list[int]:
    """Ranks that hold an expert at an expert-parallel position, ascending."""
    if expert.holders == "world":
        return groups.ranks("world")
    return list(range(position, groups.world_size, groups.ep_size))


def _ranks(region: str, groups: ParallelGroups) -> list[int]:
    return groups.ranks("expert_data" if region == "expert_data" else "world")


def _pieces(operator: Operator, view: StateView) -> list[RecordPiece[str]]:
    return [
        RecordPiece(
            record=operator.name,
            piece=piece,
            nbytes_per_element=view.bytes_per_element(piece.fqn, RecordKind.FULL),
        )
        for piece in operator.slices
    ]


def _merged(one: Parts, other: Parts) -> Parts:
    return {region: [*one[region], *other[region]] for region in REGIONS}


def _without(experts: Experts, others: Experts) -> Experts:
    return tuple(tuple(e for e in ours if e not in theirs) for ours, theirs in zip(experts, others, strict=True))
