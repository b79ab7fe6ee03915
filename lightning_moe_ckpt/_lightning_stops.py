"""Replace Lightning's handling of SIGTERM, through its private attributes.

Lightning's handler broadcasts from inside the signal handler, which hangs if another rank did not get the signal, and
before every batch rank 0 broadcasts whether it did. Its exception ends the process with status 0. Here the handler
calls a listener, nothing is broadcast, and the status says what happened; the exception's class stays, so that user
code and Lightning's own callbacks recognise it.
"""

from __future__ import annotations

import os
import signal
import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch._C import _remove_worker_pids

_OF_GROUPS = (signal.SIGTERM, signal.SIGINT)
"""Signals that processes get as members of a group or job."""

_ITERATORS = {
    "torch.utils.data.dataloader": "_MultiProcessingDataLoaderIter",
    "torchdata.stateful_dataloader.stateful_dataloader": "_StatefulMultiProcessingDataLoaderIter",
}
"""Who starts workers, by module."""


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


class ShieldedWorkers:
    """Let workers of loaders made until `remove` outlive signals to the group; who needs them ends them or dies, and they follow.

    Workers notice by themselves that their parent is gone, within seconds. What their parent ends, it kills.
    """

    def __init__(self) -> None:
        found = ((sys.modules.get(module), name) for module, name in _ITERATORS.items())
        self._patched = [(each, each.__init__) for module, name in found if (each := getattr(module, name, None))]
        for iterator, original in self._patched:
            iterator.__init__ = _shielding(original)

    def remove(self) -> None:
        """Restore torch's own iterators; workers that live on stay as they are."""
        for iterator, original in self._patched:
            iterator.__init__ = original
        self._patched = []


def _shielding(original: Callable[..., None]) -> Callable[..., None]:
    def init(iterator: Any, loader: Any, *args: Any, **options: Any) -> None:
        user = loader.worker_init_fn
        loader.worker_init_fn = _Shield(user)
        # A worker inherits what is blocked, until it has its handlers, and so does a server that forks them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_GROUPS)
        try:
            original(iterator, loader, *args, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            loader.worker_init_fn = user
        for worker in iterator._workers:
            worker._popen.terminate = partial(_kill, weakref.ref(iterator), worker._popen.kill)

    return init


def _kill(iterator: weakref.ref[Any], kill: Callable[[], None]) -> None:
    """End a worker that does not end by itself, of which torch is not to raise an error then."""
    owner = iterator()
    if owner is not None and owner._worker_pids_set:
        owner._worker_pids_set = False
        _remove_worker_pids(id(owner))
    kill()


class _Shield:
    """`worker_init_fn` after which signals to the group do not end a worker whose parent lives."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        parent = os.getppid()

        def received(signum: int, _: FrameType | None) -> None:
            if os.getppid() != parent:
                os._exit(128 + signum)

        for each in _OF_GROUPS:
            signal.signal(each, received)  # programs that a worker starts would inherit `SIG_IGN`
            signal.siginterrupt(each, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_GROUPS)
        if self.then is not None:
            self.then(worker)


def name_status(exception: BaseException, status: int) -> None:
    """Set the exit status of an exception with which Lightning left validation; without one it would mean success."""
    if isinstance(exception, SIGTERMException) and exception.code is None:
        exception.code = status
