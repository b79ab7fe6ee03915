"""Stop a fit on SIGTERM: all ranks leave at the same boundary and store a dense generation of it if possible.

The signal handler only sets a flag. Under `MoEStrategy` the flag is part of the exchange of every optimizer step. Other
strategies with several ranks need a small exchange before every batch, which replaces the broadcast that Lightning
does there. No rank waits for a peer that is gone: see `StopSignal`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_moe_ckpt._lightning_stops import ShieldedWorkers, SigtermTap
from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.parallel import GradientReducer
from lightning_moe_ckpt.process import EXIT_STATUS, StopSignal

log = rank_logger(__name__)

_FLAG = "stop"


class Stops:
    """Decide whether this fit stops, on all ranks or on none.

    Args:
        trainer: a trainer in `on_fit_start`, before Lightning installs its handlers.
        grace: longest time from the signal to the end of the process.
        any_rank: returns whether the flag is set on any rank; collective.
        before_exit: called even if the process has to be ended from outside the main thread.
    """

    def __init__(
        self,
        trainer: Trainer,
        grace: timedelta,
        *,
        any_rank: Callable[[bool], bool],
        before_exit: Callable[[], None],
    ) -> None:
        self._strategy: Any = trainer.strategy
        self._rides = isinstance(getattr(self._strategy, "reducer", None), GradientReducer) and trainer.world_size > 1
        self._any_rank = any_rank
        self._agreed = self._closed = False
        self._tap = SigtermTap(trainer, self._received)
        self._workers = ShieldedWorkers()
        self._signal = StopSignal(grace, on_late=self._tap.give_up_evaluation, before_exit=before_exit)

    def agreed(self) -> bool:
        """Return whether all ranks stop now. Every rank must ask at the same moments, between two batches or epochs."""
        self._leave_if_late()
        if not self._agreed and (self._ask_all() if self._reducer is None else bool(self._reducer.agreed[_FLAG])):
            self._agreed = True
            self._signal.start_clock()
        return self._agreed

    def agreed_at_end(self) -> bool:
        """Return whether any rank was asked to stop while training ended by itself."""
        if not self._agreed and self._ask_all():
            self._agreed = True
        return self._agreed

    def batch_begins(self) -> None:
        """Note that the main thread makes progress."""
        self._signal.beat()
        if self._signal.requested and self._reducer is not None:
            self._reducer.flags[_FLAG] = 1  # again, where a recovery has made another one
        self._leave_if_late()

    def grace(self) -> float:
        """Return the seconds that are left for saving."""
        return self._signal.allow_grace()

    def leave(self, step: int, why: str) -> NoReturn:
        """End the fit by Lightning's `SIGTERMException`, a `SystemExit` with status 143."""
        log.info("SIGTERM: stopped at step %d, %.2f s after the signal: %s", step, self._signal.seconds_since(), why)
        raise SIGTERMException(EXIT_STATUS)

    def close(self) -> None:
        """Undo the changes to the trainer; a later signal ends the process."""
        self._closed = True
        self._tap.remove()
        self._workers.remove()
        self._signal.close()
        if self._reducer is not None:
            self._reducer.flags[_FLAG] = 0

    # -- private

    @property
    def _reducer(self) -> GradientReducer | None:
        """Whose exchange tells all ranks; another one after a recovery."""
        return self._strategy.reducer if self._rides else None

    def _received(self) -> None:
        if self._closed or self._signal.receive():
            raise SIGTERMException(EXIT_STATUS)
        if self._reducer is not None:
            self._reducer.flags[_FLAG] = 1

    def _leave_if_late(self) -> None:
        if self._signal.late:
            log.info("SIGTERM: leaves at once, with what is committed")
            raise SIGTERMException(EXIT_STATUS)

    def _ask_all(self) -> bool:
        return self._any_rank(self._signal.requested)
