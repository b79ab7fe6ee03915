"""Putting what was found into the live model: everything at once, or the first slot of a sparse window."""

from __future__ import annotations

from collections.abc import Callable

from lightning_moe_ckpt.errors import IdentityMismatch
from lightning_moe_ckpt.native import CopyEngine
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.session._exchange import Exchange
from lightning_moe_ckpt.session._found import Found, understood
from lightning_moe_ckpt.session._journal import Journal
from lightning_moe_ckpt.session._layout import StateView, WindowLayout
from lightning_moe_ckpt.session._lossy_restore import LossyLoad, account, log_recovery, lossy_window
from lightning_moe_ckpt.session._planning import lay_out
from lightning_moe_ckpt.session._replay import Replay


def load_found(
    found: Found,
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
        The layout of what was found, and what goes on from it. The journal of a lossy generation has the accounting of
        tokens as of now.

    Raises:
        IdentityMismatch: its bytes do not lie where this model, plan and world put them.
        Corrupt: its plan is none.
    """
    sources, nbytes = found.experts, found.journal_nbytes
    as_user(found.start)  # first: what records hold depends on the groups of the optimizer
    with understood(f"{found.generation}: its plan"):
        if sources is None:
            layout = lay_out(found.plan, view, groups, nbytes)
        else:
            layout = lossy_window(found.plan, sources.chosen, view, groups, nbytes)
    with exchange.together(IdentityMismatch):  # each rank has records of its own
        found.check_headers([slot.segment for slot in layout.slots])
    replay = (Replay if sources is None else LossyLoad)(
        view=layout.slots[0].view,
        groups=groups,
        slots=layout.slots,
        segments=found.segments,
        first_step=found.first_step,
        may_skip=may_skip,
        engine=engine,
        as_user=as_user,
    )
    replay.load(found.first_step)
    replay.load_buffers()
    if sources is not None:
        outcome = replay.journals[0]["outcome"]
        accounted = account(outcome, sources, view.operators)
        log_recovery(found.generation, sources, accounted, view.operators)
        outcome["bad"] = {
            name: frozenset(each for each, stored in bad.items() if stored) for name, bad in sources.chosen.bad.items()
        }
        if accounted is not None:
            outcome["accounting"] = accounted[0].to_journal()
            outcome["lost"] = accounted[1]
    return layout, replay
