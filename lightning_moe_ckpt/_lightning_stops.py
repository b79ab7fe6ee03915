"""Private touches of Lightning around SIGTERM; the one other module that may do so is `_lightning`.

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
    """Puts a listener in the place of Lightning's SIGTERM handler for one fit; construct it before `on_train_start`.

    Lightning installs what it finds under the handler's name once `on_fit_start` has run, together with the handlers
    that the user had installed before, and puts the originals back when it tears down.
    """

    def __init__(self, trainer: Trainer, listener: Callable[[], None]) -> None:
        self._trainer, self._listener, self._pid = trainer, listener, os.getpid()
        self._connector = trainer._signal_connector
        self._connector._sigterm_notifier_fn = self._received  # type: ignore[method-assign,assignment]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]

    def _received(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child: no news for who trains, nor for its other processes
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        launcher = self._trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)  # the processes that Lightning has started itself
        self._listener()

    def give_up_evaluation(self) -> None:
        """Let Lightning leave validation after the batch under way."""
        self._connector.received_sigterm = True

    def remove(self) -> None:
        """Give Lightning its own methods back."""
        self._connector.__dict__.pop("_sigterm_notifier_fn", None)
        self._trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)


def _nothing() -> None:
    """In place of a broadcast."""


def name_status(exception: BaseException, status: int) -> None:
    """Where Lightning left by itself, in validation, its exception has no status, which would mean success."""
    if isinstance(exception, SIGTERMException) and exception.code is None:
        exception.code = status


def stopped(status: int) -> SIGTERMException:
    """What ends a fit on SIGTERM; a `SystemExit`, so an uncaught one ends the process with `status`."""
    return SIGTERMException(status)
