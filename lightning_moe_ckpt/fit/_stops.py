"""Stop a fit on SIGTERM: all ranks leave at the same boundary and store a dense generation of it if possible.

Lightning's handler broadcasts from inside the signal handler, which hangs if another rank did not get the signal, and
before every batch rank 0 broadcasts whether it did. Its exception ends the process with status 0. Here the handler only
sets a flag, and the status tells the cause; the exception's class stays, so that user code and Lightning's own
callbacks recognise it. Under `MoEStrategy` the flag is part of every optimizer step's exchange. Other strategies with
several ranks need a small exchange before every batch. No rank waits for a dead peer: see `StopSignal`.

One sentence names dead ranks and where training goes on, before the tracebacks of aborted collectives.
"""

from __future__ import annotations

import os
import signal
import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch._C import _remove_worker_pids

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Neighbours
from lightning_moe_ckpt.parallel import GradientReducer
from lightning_moe_ckpt.parallel._groups import is_of_collective, restarts_left
from lightning_moe_ckpt.process import EXIT_STATUS, StopSignal

log = rank_logger(__name__)

_FLAG = "stop"


class Stops:
    """Decide whether this fit stops, on all ranks or on none; made in `on_fit_start`, before Lightning installs its
    handlers.

    `grace` is the longest time from the signal to the process's end; `any_rank` returns whether the flag is set on any
    rank, and is collective; `before_exit` is called even if the process has to be ended from outside the main thread.
    """

    def __init__(
        self, trainer: Trainer, grace: timedelta, *, any_rank: Callable[[bool], bool], before_exit: Callable[[], None]
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
            self._reducer.flags[_FLAG] = 1  # again: a recovery replaces the reducer
        self._leave_if_late()

    def grace(self) -> float:
        """Return the seconds left for saving."""
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
        """Reducer whose exchange carries the flag, a new reducer after a recovery; `None` if no reducer does."""
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


_OF_GROUPS = (signal.SIGTERM, signal.SIGINT)
"""Signals that processes get as members of a group or job."""

_ITERATORS = {
    "torch.utils.data.dataloader": "_MultiProcessingDataLoaderIter",
    "torchdata.stateful_dataloader.stateful_dataloader": "_StatefulMultiProcessingDataLoaderIter",
}
"""Classes that start workers, by module."""


class SigtermTap:
    """Replace Lightning's SIGTERM handler by a listener for one fit; construct before `on_train_start`.

    Lightning looks its handler up by name once `on_fit_start` has run, installs it with the handlers that the user had
    installed before, and puts the originals back when it tears down.
    """

    def __init__(self, trainer: Trainer, listener: Callable[[], None]) -> None:
        self._trainer, self._listener, self._pid = trainer, listener, os.getpid()
        self._connector = trainer._signal_connector
        self._connector._sigterm_notifier_fn = self._received  # type: ignore[method-assign,assignment]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def _received(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child: its signal does not concern the training process
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        if (launcher := self._trainer.strategy.launcher) is not None:
            launcher.kill(signum)  # processes started by Lightning itself
        self._listener()

    def give_up_evaluation(self) -> None:
        """Let Lightning leave validation after the current batch."""
        self._connector.received_sigterm = True

    def remove(self) -> None:
        """Restore Lightning's own methods."""
        self._connector.__dict__.pop("_sigterm_notifier_fn", None)
        self._trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)


class ShieldedWorkers:
    """Let loaders' workers made until `remove` outlive signals to the group; their parent ends them, by killing.

    Workers notice their parent's death by themselves, within seconds.
    """

    def __init__(self) -> None:
        found = ((sys.modules.get(module), name) for module, name in _ITERATORS.items())
        self._patched = [(each, each.__init__) for module, name in found if (each := getattr(module, name, None))]
        for iterator, original in self._patched:
            iterator.__init__ = _shielding(original)

    def remove(self) -> None:
        """Restore torch's own iterators; living workers stay as they are."""
        for iterator, original in self._patched:
            iterator.__init__ = original
        self._patched = []


def _shielding(original: Callable[..., None]) -> Callable[..., None]:
    def init(iterator: Any, loader: Any, *args: Any, **options: Any) -> None:
        user = loader.worker_init_fn
        loader.worker_init_fn = _Shield(user)
        # Workers, and a server that forks them, inherit blocked signals until handlers are installed.
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
    """End a worker that does not end by itself, without torch raising an error."""
    if (owner := iterator()) is not None and owner._worker_pids_set:
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

        for group in _OF_GROUPS:
            signal.signal(group, received)  # a worker's child programs would inherit `SIG_IGN`
            signal.siginterrupt(group, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_GROUPS)
        if self.then is not None:
            self.then(worker)


def name_status(exception: BaseException, status: int) -> None:
    """Set the exit status of the exception with which Lightning left validation; none would mean success."""
    if isinstance(exception, SIGTERMException) and exception.code is None:
        exception.code = status


_LOOK_SECONDS = 1.0
"""Seconds that a process that broke its connections may take to be gone."""


def say_who_is_gone(neighbours: Neighbours | None, newest_step: int | None, error: BaseException) -> None:
    """Log dead ranks, once per node, if `error` is a collective's and a peer is gone, and the newest boundary that all ranks have."""
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
