"""Putting what was found into the live model: everything at once, or the first slot of a sparse window.

Of a partial generation, ranks put their parts together from wherever they are into one segment that looks as if it had been
taken at once, with the pieces of each expert as the generation that it comes from had cut them. So it is loaded like any
other: each record is read by its writer and broadcast to the others that hold it.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import IdentityMismatch
from lightning_moe_ckpt.journal import Journal
from lightning_moe_ckpt.native import CopyEngine
from lightning_moe_ckpt.operators import Operator, ParamSlice, RecordKind
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.recovery._attempt import RestorePlan, ShardSource
from lightning_moe_ckpt.recovery._found import RestoreSource, understood
from lightning_moe_ckpt.recovery._replay import Replay
from lightning_moe_ckpt.recovery._token_loss import note_recovery
from lightning_moe_ckpt.snapshot import (
    REGIONS,
    FileLayout,
    PlanRecord,
    Shard,
    StateView,
    StepLayout,
    WindowLayout,
    lay_out,
)


def load_found(
    found: RestoreSource,
    view: StateView,
    groups: ParallelGroups,
    exchange: Exchange,
    engine: CopyEngine,
    *,
    may_skip: bool,
    as_user: Callable[[Journal], None],
) -> tuple[WindowLayout, Replay]:
    """Load the first slot, and buffers. Collective.

    Args:
        found: a verified generation.
        view: live state to write to.
        groups: this rank's place.
        exchange: control exchange.
        engine: copies host memory into live tensors.
        may_skip: see `Replay`.
        as_user: see `Replay`.

    Returns:
        The layout of what was found, and what goes on from it. Its journal has the accounting of tokens as of now.

    Raises:
        IdentityMismatch: its bytes do not lie where this model, plan and world put them.
        Corrupt: its plan is none.
    """
    as_user(found.start)  # first: what records hold depends on the groups of the optimizer
    with understood(f"{found.generation}: its plan"):
        layout = restored_window(found.plan, found.chosen, view, groups, found.journal_nbytes)
    with exchange.raise_together(IdentityMismatch):  # each rank has records of its own
        found.check_headers([step.durable.segment for step in layout.steps])
    replay = Replay(
        view=layout.steps[0].view,
        groups=groups,
        slots=[step.durable for step in layout.steps],
        segments=found.segments,
        first_step=found.first_step,
        may_skip=may_skip,
        engine=engine,
        as_user=as_user,
        missing=found.chosen.missing,
    )
    replay.load(found.first_step)
    replay.load_buffers()
    note_recovery(found, replay.journals[0]["outcome"], view.operators)
    return layout, replay


def restored_window(
    record: PlanRecord, chosen: RestorePlan, view: StateView, groups: ParallelGroups, journal_nbytes: int
) -> WindowLayout:
    """The layout of a restored state: that of its generation; where experts are from others, with all of them, cut as there.

    Raises:
        IdentityMismatch: the plan is for other experts.
    """
    window = lay_out(record, view, groups, journal_nbytes)
    if not chosen.is_partial:
        return window
    parts = {
        region: [
            part for part in window.steps[0].durable.parts[region] if view.operators[part.operator].kind != "expert"
        ]
        for region in REGIONS
    }
    for name, tiles in chosen.tiles.items():
        if name in view.operators:  # else it is on other ranks
            operator = view.operators[name]
            parts[operator.holders] += [_part(operator, tile) for tile in tiles]
    return WindowLayout(record=record, steps=[StepLayout(FileLayout(parts, view, groups, journal_nbytes))])


def _part(operator: Operator, tile: ShardSource) -> Shard:
    whole = next((each for each in operator.slices if _covers(each, tile)), None)
    if whole is None:
        raise IdentityMismatch(
            f"`{tile.fqn}`: elements from {tile.global_start} on are not of {operator.name}, as the run has it. "
            "Resume with the code that wrote it, or start anew with resume='never'."
        )
    start = whole.start + tile.global_start - whole.global_start
    piece = ParamSlice(
        fqn=tile.fqn,
        start=start,
        stop=start + tile.numel,
        global_shape=whole.global_shape,
        global_start=tile.global_start,
    )
    return Shard(operator=operator.name, kind=RecordKind.FULL, piece=piece, writer=tile.writer)


def _covers(whole: ParamSlice, tile: ShardSource) -> bool:
    stop = whole.global_start + whole.numel
    return whole.fqn == tile.fqn and whole.global_start <= tile.global_start and tile.global_start + tile.numel <= stop
