"""Weights that forward or backward passes change in place, while a boundary is copied that has to have what they were before."""

from __future__ import annotations

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.snapshot import BoundaryCapture

log = rank_logger(__name__)

_TORN = "weights were changed in place, by a forward or backward pass, while they were copied; from here on it waits for copies"


class PassEdits:
    """Whether passes change weights, as `nn.Embedding(max_norm=...)` does: nobody knows before it happens.

    Copies of the first window are waited for as each batch begins, and all from the first change on. In between copies run
    while passes do, and what meets a change then is not used. Changes through `.data` wait for copies, see `DataAccess`.
    """

    def __init__(self) -> None:
        self._seen: bool | None = None
        """Unknown until a window has been taken."""

    @property
    def may_come(self) -> bool:
        """Whether copies of a boundary are to be waited for as the batch begins."""
        return self._seen is not False

    def torn(self, pending: BoundaryCapture) -> str | None:
        """Return why a sealed boundary is of no use, as copies under way may have met a change; `None` if they have not."""
        if self._seen or not pending.is_overtaken:
            pending.had_arrived = pending.ticket.done
            return None
        waited, self._seen = self._seen is None, True
        log.info("forward or backward passes change weights in place: from here on they wait for copies of a boundary")
        return None if waited or pending.had_arrived else _TORN

    def window_taken(self) -> None:
        """Trust in what was seen, or not, of the first window."""
        self._seen = bool(self._seen)
