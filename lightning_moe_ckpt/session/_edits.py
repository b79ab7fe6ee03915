"""Weights that forward or backward passes change in place while a boundary's copies still read them."""

from __future__ import annotations

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.snapshot import BoundaryCapture

log = rank_logger(__name__)

_TORN = "weights were changed in place, by a forward or backward pass, while they were copied; from here on it waits for copies"


class PassEdits:
    """Whether passes change weights, as `nn.Embedding(max_norm=...)` does, which is unknown before the first change.

    Each batch waits for copies during the first window, and always after the first change. In between, copies run
    beside passes, and a copy that may have met a change is not used. Changes through `.data` wait for copies, see
    `DataAccess`.
    """

    def __init__(self) -> None:
        self._seen: bool | None = None
        """Whether a pass has changed weights; `None` before the first window."""

    @property
    def may_come(self) -> bool:
        """Whether a batch begins with a wait for the boundary's copies."""
        return self._seen is not False

    def torn(self, pending: BoundaryCapture) -> str | None:
        """Return why a sealed boundary is useless, since its copies may have met a change; `None` if they have not."""
        if self._seen or not pending.is_overtaken:
            pending.had_arrived = pending.ticket.done
            return None
        waited, self._seen = self._seen is None, True
        log.info("forward or backward passes change weights in place: from here on they wait for copies of a boundary")
        return None if waited or pending.had_arrived else _TORN

    def window_taken(self) -> None:
        """Take the first window's observation as valid from here on."""
        self._seen = bool(self._seen)
