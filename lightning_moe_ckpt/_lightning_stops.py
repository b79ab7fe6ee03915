"""Replace Lightning's handling of SIGTERM, through its private attributes.

Lightning's handler broadcasts from inside the signal handler, which hangs if another rank did not get the signal, and
before every batch rank 0 broadcasts whether it did. Its exception ends the process with status 0. Here the handler
calls a listener, nothing is broadcast, and the status says what happened; the exception's class stays, so that user
code and Lightning's own callbacks recognise it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException


class SigtermTap:
    """Replace Lightning's SIGTERM handler by a listener for one fit; construct it before `on_train_start`.

    Lightning installs what it finds under the handler's name once `on_fit_start` has run, together with the handlers
    that the user had installed before, and puts the originals back when it tears down.
    """

    def __init__(self, trainer: Trainer, listener: Callable[[], None]) -> None:
        self._trainer, self._listener, self._pid = trainer, listener, os.getpid()
        self._connector = trainer._signal_connector
        self._connector._sigterm_notifier_fn = self._received  # type: ignore[method-assign,assignment]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]

    def _received(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child: its signal does not concern the training process
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        launcher = self._trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)  # the processes that Lightning has started itself
        self._listener()

    def give_up_evaluation(self) -> None:
        """Let Lightning leave validation after the current batch."""
        self._connector.received_sigterm = True

    def remove(self) -> None:
        """Restore Lightning's own methods."""
        self._connector.__dict__.pop("_sigterm_notifier_fn", None)
        self._trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)


def _nothing() -> None:
    """Do nothing, in place of a broadcast."""


def name_status(exception: BaseException, status: int) -> None:
    """Set the exit status of an exception with which Lightning left validation; without one it would mean success."""
    if isinstance(exception, SIGTERMException) and exception.code is None:
        exception.code = status
