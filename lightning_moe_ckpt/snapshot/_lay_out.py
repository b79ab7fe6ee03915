"""Place a plan's bytes: which rank writes which shard of which record, in which file, at which offset.

If a plan takes everything, each file is balanced over the ranks that hold its records. In a partial plan an expert is
always cut between its holders in the same way: a rank's shard of an expert has the same coordinates in every
generation, so that a reader can put a state together from several. Dense operators and routers are whole in every
generation, so their shards may move: they go to the ranks with fewest bytes, experts included.

Source: PEC/MoC (2024), Sec. 3.2 (adaptive data-parallel sharding).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import chain

import torch

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import ConfigurationError, IdentityMismatch
from lightning_moe_ckpt.operators import Operator, OperatorSet, ParamSlice, RecordKind, Region, split, unit_of
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.policies import (
    DensePolicy,
    PlanInputs,
    PlanRecord,
    Shard,
    WindowStep,
    all_names,
    assign_adaptively,
    assign_writers,
    cut_among,
    expert_names,
    writers_of,
)
from lightning_moe_ckpt.snapshot._layout import JOURNAL, FileLayout, OperatorSlice, StateView, StepLayout, WindowLayout
from lightning_moe_ckpt.snapshot._shards import numel_of
from lightning_moe_ckpt.storage import MAX_HEADER_NBYTES

log = rank_logger(__name__)

EXPERT_SPLIT_NBYTES = 4 * 2**10
"""Least bytes of an expert's slice that is cut between its holders, in partial plans."""

MAX_PIECES = 1024
"""Most pieces into which an operator is cut."""

_ENTRY_NBYTES = 256
"""Bytes per tensor in a header, at most, roughly: its entry and the entry of the gap behind it."""

_ALIGN_NBYTES = 64

Shards = dict[Region, list[Shard]]
"""Shards by region, over all its writers, in stored order."""


def lay_out(record: PlanRecord, view: StateView, groups: ParallelGroups, journal_nbytes: int) -> WindowLayout:
    """Make a stored or fresh plan of all stages concrete on this rank. Raises `IdentityMismatch` if the plan is for other operators."""
    record = record.of_stage(groups.stage)
    dtypes = {fqn: getattr(torch, name) for fqn, name in record.compute_dtypes.items() if fqn in view.params}
    view = view.assuming(averages_consumed=record.averages_consumed)
    if (record.constants, record.thawed) != (view.operators.constants, view.operators.thawed):
        view = view.replanned(view.operators.without(record.constants, record.thawed), dtypes)
    view = view.replanned(split_operators(view, groups, record.split_nbytes), dtypes)
    _expect_operators(record, view.operators)
    shards = partial(_stable_shards, fixed=record.fixed) if record.plan.partial else _balanced_shards
    return WindowLayout(
        record=record,
        steps=[_step(shards(step, view, groups), view, groups, journal_nbytes) for step in record.plan.steps],
    )


def packed_layout(layout: StepLayout, packed: Mapping[str, int]) -> StepLayout:
    """Return the layout of a difference whose compressed gradients have so many bytes, by shard."""
    file = layout.durable
    packed_file = FileLayout(file.shards, file.view, file.groups, file.segment.span(JOURNAL).nbytes, packed=packed)
    return StepLayout(packed_file, mirroring=layout.mirroring)


def dense_layout(view: StateView, groups: ParallelGroups, journal_nbytes: int) -> WindowLayout:
    """Return the layout of one step with everything, whatever the policy: a run's first and last generation."""
    return lay_out(own_dense_plan(view) if view.dense_plan is None else view.dense_plan, view, groups, journal_nbytes)


def own_dense_plan(view: StateView) -> PlanRecord:
    """Return the plan of everything of this rank's pipeline stage."""
    policy = DensePolicy()
    plan = policy.plan(PlanInputs(operators=view.operators))
    return PlanRecord.over(view.operators, plan=plan, config=policy.config())


def dense_plan_of_stages(view: StateView, groups: ParallelGroups, exchange: Exchange) -> PlanRecord | None:
    """Return the plan that takes everything of all pipeline stages; `None` with a single stage. Collective. Raises `ConfigurationError` if
    two stages call an operator by the same name.
    """
    if groups.num_stages == 1:
        return None
    said = exchange.gather_values(own_dense_plan(view).to_json())[:: groups.stage_size]
    records = [PlanRecord.from_json(str(text)) for text in said]
    count = Counter(name for record in records for name in record.plan.names)
    if twice := [name for name, times in count.items() if times > 1]:
        where = [stage for stage, record in enumerate(records) if twice[0] in record.plan.names]
        raise ConfigurationError(
            f"Stages {where} each have an operator `{twice[0]}`: parameters that belong to no block are stored together under "
            "the name of the module that has them. Put those of one stage into a submodule with a name of its own."
        )
    return PlanRecord.joined(records, [False] * len(records), groups.stage)


def expect_header_fits(view: StateView, groups: ParallelGroups) -> None:
    """Check before training that a file's header can describe all that this rank writes. Raises `ConfigurationError` if the header would be
    too long.
    """
    forms = cache(partial(view.forms, kind=RecordKind.FULL))
    tensors = sum(len(forms(piece.fqn)) / _num_holders(op, groups) for op in view.operators for piece in op.slices)
    if tensors * _ENTRY_NBYTES < MAX_HEADER_NBYTES:
        return
    try:
        dense_layout(view, groups, journal_nbytes=1)
    except ValueError as error:
        raise ConfigurationError(
            f"{len(view.operators)} operators are more than one rank can store. {error} `expert_parallel` spreads experts."
        ) from error


def dense_nbytes(view: StateView, groups: ParallelGroups) -> int:
    """Return this rank's bytes in a snapshot of everything, without alignment and journal."""
    return sum(full for full, _ in record_nbytes(view, groups).values())


def log_plan(layout: WindowLayout, dense_nbytes: int, *, again: bool) -> None:
    """Log the sizes of a plan in force from here on, at level DEBUG if every generation has a plan (`again`)."""
    log.log(
        logging.DEBUG if again else logging.INFO,
        "plan %s: %d segments of at most %s (everything: %s)",
        layout.record.plan_hash[:8],
        len(layout.steps),
        size_text(layout.slot_nbytes),
        size_text(dense_nbytes),
        alike=True,
    )


def record_nbytes(view: StateView, groups: ParallelGroups) -> dict[str, tuple[int, int]]:
    """Return the bytes that this rank writes for each operator's FULL and COMPUTE record: an even share."""
    full, compute = view.widths(RecordKind.FULL), view.widths(RecordKind.COMPUTE)
    sizes: dict[str, tuple[int, int]] = {}
    for op in view.operators:
        lengths, holders = [(piece.fqn, piece.stop - piece.start) for piece in op.slices], _num_holders(op, groups)
        nbytes = [sum([length * width(fqn) for fqn, length in lengths]) for width in (full, compute)]
        sizes[op.name] = -(-nbytes[0] // holders), -(-nbytes[1] // holders)
    return sizes


def share_written(view: StateView, groups: ParallelGroups, ranks: Collection[int]) -> float:
    """Return the share, in all that this rank writes, of records that all these ranks hold, 0 to 1."""
    width, sizes = view.widths(RecordKind.FULL), dict[Region, float]()
    for region, slices in view.by_region(view.operators.operators, groups).items():
        sizes[region] = sum(piece.numel * width(piece.fqn) for _, piece in slices) / len(region)
    common = sum(nbytes for region, nbytes in sizes.items() if ranks and set(region).issuperset(ranks))
    return common / max(1, sum(sizes.values()))


def split_operators(view: StateView, groups: ParallelGroups, limit: int) -> OperatorSet:
    """Return the operators; one with over `limit` bytes on this rank is cut into pieces. 0 cuts none."""
    if limit == 0:
        return view.operators
    sizes, coupling = record_nbytes(view, groups), view.schema.reach.coupling
    cut: list[Operator] = []
    for op in view.operators:
        if sizes[op.name][0] <= limit:
            cut.append(op)
        else:
            widths = {s.fqn: view.bytes_per_element(s.fqn, RecordKind.FULL) for s in op.slices}
            holders = _num_holders(op, groups)
            # Even with a tiny budget a piece has one element, or what the optimizer updates together; pieces are limited in number.
            least = [widths[s.fqn] * unit_of(s, coupling) for s in op.slices]
            nbytes = max(limit * holders, *least, -(-sizes[op.name][0] * holders // MAX_PIECES), 1)
            cut += split(op, nbytes, lambda s, widths=widths: widths[s.fqn], coupling)  # type: ignore[misc]
    return view.operators.with_operators(cut)


def expert_loads(view: StateView, groups: ParallelGroups, names: Iterable[str]) -> dict[int, int]:
    """Return the bytes of the named experts by writing rank; experts of a layer are equal in size.

    Experts in shards count as nothing: no rank knows all boxes.
    """
    loads = dict.fromkeys(range(groups.world_size), 0)
    if view.boxes:
        return loads
    operators, width = view.operators, view.widths(RecordKind.FULL)
    place = {name: (layer, expert) for layer in operators.layers for expert, name in enumerate(expert_names(layer))}
    for layer, expert in (place[name] for name in names if name in place):
        template = operators[expert_names(layer)[layer.local_expert_ids[0]]]
        holders = _holders(template, groups, expert // len(layer.local_expert_ids))
        for shard in _cut([(template, piece) for piece in template.slices], view, holders, turn=expert):
            loads[shard.writer] += shard.slice.numel * width(shard.slice.fqn)
    return loads


def expert_nbytes(view: StateView, groups: ParallelGroups) -> dict[str, int]:
    """Return this rank's bytes for each expert in partial plans, with the gaps behind tensors, by name."""
    found: dict[str, int] = {}
    if view.boxes:
        for op in (op for op in view.operators if op.expert_idx is not None):
            shards = [shard for each in _expert_shards(op, view, groups).values() for shard in each]
            found[op.name] = sum(_aligned_nbytes(shard, view) for shard in shards if shard.writer == groups.rank)
        return found
    for layer in view.operators.layers:
        names = expert_names(layer)
        template = view.operators[names[layer.local_expert_ids[0]]]
        holders = groups.ranks(template.holders)
        # Experts of a layer are equal, and cut alike except for the first holder's turn.
        slices = [(template, piece) for piece in template.slices]
        turns = [_cut(slices, view, holders, turn=turn) for turn in range(len(holders))]
        sizes = [sum(_aligned_nbytes(shard, view) for shard in turn if shard.writer == groups.rank) for turn in turns]
        found |= {names[expert]: sizes[expert % len(holders)] for expert in layer.local_expert_ids}
    return found


def _aligned_nbytes(shard: Shard, view: StateView) -> int:
    forms = view.forms(shard.slice.fqn, shard.kind, not shard.slice.start)
    sizes = [form[1].itemsize * numel_of(form, shard.slice.numel) for form in forms]
    return sum(nbytes + -nbytes % _ALIGN_NBYTES for nbytes in sizes)


def _step(files: Sequence[Shards], view: StateView, groups: ParallelGroups, journal_nbytes: int) -> StepLayout:
    durable = FileLayout(files[0], view, groups, journal_nbytes)
    return StepLayout(
        durable, *(FileLayout(file, view, groups, None, audience="node", start=durable.stop) for file in files[1:])
    )


def _expect_operators(record: PlanRecord, operators: OperatorSet) -> None:
    plan = record.plan
    named, known = set(plan.names), all_names(operators)
    experts = {name for layer in operators.layers for name in expert_names(layer)} if plan.partial else set()
    unknown = set() if record.stages else named - set(known)  # other stages have the rest
    missing = [name for name in known if name not in named and name not in experts]
    if unknown or missing:
        raise IdentityMismatch(
            f"The stored plan is of other operators than this model has: it lacks {missing[:4] or 'none'}, and names "
            f"{sorted(unknown)[:4] or 'none'} that are not there. Resume with the code and the policy that wrote it, or start anew "
            "with resume='never'."
        )


# -- plans that take everything


def _balanced_shards(step: WindowStep, view: StateView, groups: ParallelGroups) -> list[Shards]:
    """Return the shards by file: every record shared out evenly among its holders."""
    return [shards_of(step.files[audience], view, groups) for audience in step.audiences]


def shards_of(records: Mapping[str, RecordKind], view: StateView, groups: ParallelGroups) -> Shards:
    """Return this rank's regions with their shards, over all their writers."""
    operators, alone = [view.operators[name] for name in records if name in view.operators], Shards()
    regions = {holders: tuple(groups.ranks(holders)) for holders in dict.fromkeys([op.holders for op in operators])}
    for holders, region in regions.items():
        if len(region) == 1 and not view.boxes:
            own = [op for op in operators if op.holders == holders]
            alone[region] = list(chain.from_iterable([_all_of(op, records[op.name], view, *region) for op in own]))
    shared = [op for op in operators if regions[op.holders] not in alone]
    return alone | {
        region: _shared_out([(op.name, records[op.name], piece) for op, piece in slices], region, view)
        for region, slices in view.by_region(shared, groups).items()
    }


def _all_of(operator: Operator, kind: RecordKind, view: StateView, writer: int) -> list[Shard]:
    """Return the shards of an operator that is on one rank only."""
    if kind is RecordKind.COMPUTE and (known := view.repeated.get(operator.name)) is not None:
        return known
    found = [Shard(operator.name, kind, piece, writer) for piece in operator.slices]
    if kind is RecordKind.COMPUTE:  # taken again at the window's next steps
        view.repeated[operator.name] = found
    return found


def _shared_out(taken: Sequence[tuple[str, RecordKind, ParamSlice]], holders: Region, view: StateView) -> list[Shard]:
    # Differentials are cut like their states: a rank with a shard of one has the same shard of the other.
    kinds = {kind for _, kind, _ in taken}
    widths = {kind: view.widths(RecordKind.FULL if kind is RecordKind.DELTA else kind) for kind in kinds}
    sizes = [0] * len(taken)
    if len(holders) > 1:
        sizes = [(piece.stop - piece.start) * widths[kind](piece.fqn) for _, kind, piece in taken]
    shards: list[Shard] = []
    for (name, kind, piece), writer in zip(taken, writers_of(sizes, holders), strict=True):
        key = (id(piece), writer) if kind is RecordKind.COMPUTE else None
        if (found := view.repeated.get(key)) is None:
            shares = [(piece, writer)] if writer is not None else cut_among(piece, holders)
            found = [Shard(name, kind, each, rank) for each, rank in shares]
            if key is not None:
                view.repeated[key] = found
        shards += found
    return shards


# -- partial plans


def _stable_shards(step: WindowStep, view: StateView, groups: ParallelGroups, *, fixed: bool) -> list[Shards]:
    """Return the shards by file: experts in their fixed cut; the durable file begins with all of the dense part.

    The dense part's cut makes up for ranks that write more of these experts, unless it is `fixed`.
    """
    found: list[Shards] = []
    for audience in step.audiences:
        names = list(step.files[audience])
        shards: Shards = {}
        if audience == "durable":
            shards = _dense_shards(view, groups, expert_loads(view, groups, () if fixed else names))
        for operator in (view.operators[name] for name in names if name in view.operators):
            if operator.expert_idx is not None:
                for region, each in _expert_shards(operator, view, groups).items():
                    shards.setdefault(region, []).extend(each)
        found.append(shards)
    return found


def _dense_shards(view: StateView, groups: ParallelGroups, loads: Mapping[int, int]) -> Shards:
    """Return the shards of all dense operators by region, balanced with the `loads` that ranks write already."""
    dense, width = [op for op in view.operators if op.kind != "expert"], view.widths(RecordKind.FULL)
    return {
        region: assign_adaptively([(op.name, piece) for op, piece in slices], width, region, loads)
        for region, slices in view.by_region(dense, groups).items()
    }


def _expert_shards(operator: Operator, view: StateView, groups: ParallelGroups) -> Shards:
    assert operator.expert_idx is not None
    slices = view.by_region([operator], groups)
    return {region: _cut(each, view, region, turn=operator.expert_idx) for region, each in slices.items()}


def _cut(slices: Sequence[OperatorSlice], view: StateView, holders: Sequence[int], *, turn: int) -> list[Shard]:
    """Return the shards of one expert; holders take turns, so that small pieces do not all go to one rank."""
    first = turn % len(holders)
    turned = [*holders[first:], *holders[:first]]
    pieces, width = [(operator.name, piece) for operator, piece in slices], view.widths(RecordKind.FULL)
    shards = assign_writers(pieces, width, range(len(turned)), split_nbytes=EXPERT_SPLIT_NBYTES)
    return [shard._replace(writer=turned[shard.writer]) for shard in shards]


def _holders(expert: Operator, groups: ParallelGroups, position: int) -> list[int]:
    """Return this stage's holders of an expert at an expert-parallel position, ascending."""
    stage = groups.ranks("stage")
    return stage if expert.holders == "stage" else stage[position :: groups.ep_size]


def _num_holders(operator: Operator, groups: ParallelGroups) -> int:
    return groups.dp_size if operator.holders == "expert_data" else groups.stage_size
