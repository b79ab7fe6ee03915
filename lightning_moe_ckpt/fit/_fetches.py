"""Keep the random state before those fetches of an epoch that influence later ones.

A resumed run fetches again what its epoch has consumed, without the draws of training from the same generators in
between. Most fetches do not need those: an item depends on its own draws only, and is thrown away. Two kinds do. One is
the fetch in which one of several loaders starts over, whose sampler and workers draw seeds in mid-epoch. The other is
every fetch of a loader that keeps what it drew for later, such as a stream through a shuffle buffer. The state before
a fetch is kept if it differs from the state after the previous one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.journal import RngState, differs

log = rank_logger(__name__)

_MOST = 1_000
"""Most states that are kept of one epoch; each takes several KB of every journal."""

_STATE_NBYTES = 2**13

NO_FETCHES: dict[str, Any] = {"states": {}, "restarts": {}}
"""Stands for the entry of a journal that has none."""


class FetchLog:
    """Random state before the fetches of the current epoch that influence later ones."""

    def __init__(self) -> None:
        self._said = False
        self.begin()

    def begin(self) -> None:
        """Start over, before a new iterator is made."""
        self._index = 0
        self._states: dict[int, RngState] = {}
        self._restarts: dict[int, int] = {}
        self._after: RngState | None = None

    def fetched(
        self, before: RngState, after: Callable[[], RngState], *, restarted: Sequence[int], carries: bool
    ) -> None:
        """Record that a batch was fetched.

        Args:
            before: random state before the fetch.
            after: returns the random state after the fetch.
            restarted: indices of loaders that started over in the fetch.
            carries: whether later fetches may depend on draws of this one.
        """
        index, self._index = self._index, self._index + 1
        last, self._after = self._after, after() if carries else None
        if index == 0:
            return  # the recorder keeps the state before the epoch's first fetch
        for loader in restarted:
            self._restarts[loader] = index
        apart = before if restarted else _apart(last, before, self._after) if self._after is not None else {}
        if apart:
            self._keep(index, apart)
        if restarted and not carries:
            self._states = {at: self._states[at] for at in sorted({*self._restarts.values()}) if at in self._states}

    def take(self) -> dict[str, Any]:
        """Return the kept states for the journal."""
        return {"states": dict(self._states), "restarts": dict(self._restarts)}

    def restore(self, taken: dict[str, Any], *, num_fetched: int) -> None:
        """Continue from a journal's states, after `num_fetched` fetches."""
        self.begin()
        self._index = num_fetched
        self._states, self._restarts = dict(taken["states"]), dict(taken["restarts"])

    @staticmethod
    def room(*, num_loaders: int, num_batches: float, carries: bool) -> int:
        """Return the most bytes that an epoch may add to a journal."""
        return int(min(num_batches, _MOST)) * _STATE_NBYTES if carries else (num_loaders - 1) * _STATE_NBYTES

    def _keep(self, index: int, state: RngState) -> None:
        if len(self._states) < _MOST:
            self._states[index] = state
        elif not self._said:
            self._said = True
            log.warning(
                "a restart in the rest of this epoch is not exact: the loader draws random numbers in every fetch, training "
                "does so in between, and the state of only %d fetches is kept. Give the data set a generator of its own.",
                _MOST,
            )


def _apart(last: RngState | None, before: RngState, after: RngState) -> RngState:
    """Return the state of generators that the fetch drew from and that have moved since the previous fetch."""
    return {
        name: state
        for name, state in before.items()
        if differs(after[name], state) and (last is None or differs(last[name], state))
    }
