"""Say in one sentence which rank has died and from where training goes on, before the tracebacks of aborted collectives."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Neighbours
from lightning_moe_ckpt.parallel._elastic import is_of_collective, restarts_left

log = rank_logger(__name__)

_LOOK_SECONDS = 1.0
"""How long a process that broke its connections may take to be gone."""


def say_who_is_gone(neighbours: Neighbours | None, newest_step: int | None, error: BaseException) -> None:
    """Log it, once per node, if `error` is that of a collective whose peer is gone.

    Args:
        neighbours: the ranks' processes; `None` before they were known.
        newest_step: boundary that all ranks have; `None` if there is none yet.
        error: what ends this fit.
    """
    if neighbours is None or not is_of_collective(error):
        return
    gone = neighbours.gone(_LOOK_SECONDS)
    if neighbours.speaks:
        log.warning("%s; %s", _who(gone), _then(newest_step, restarts=restarts_left()))


def _who(gone: Sequence[int]) -> str:
    if not gone:
        return "another rank is gone, or does not answer"
    return f"rank {gone[0]} is gone" if len(gone) == 1 else f"ranks {', '.join(map(str, gone))} are gone"


def _then(step: int | None, *, restarts: bool) -> str:
    if restarts:
        return "training starts again from " + ("the beginning" if step is None else f"step {step} or a newer one")
    if step is None:
        return "nothing was whole on all ranks yet, the next start of this job begins anew"
    return f"start this job again, it goes on from step {step} or a newer one"
