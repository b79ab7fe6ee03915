"""Random state before those fetches of an epoch that left something behind for later ones.

A resumed run fetches again what its epoch has consumed. Training drew from the same generators in between, and does not
do so then. Most fetches do not care: an item depends on its own draws only, and is thrown away. Two kinds do: the one in
which a loader of several starts over, whose sampler and workers draw their seeds in the middle of the epoch, and every
fetch of a loader that carries what it drew on, such as a stream through a shuffle buffer. The state is kept where it is
not what the fetch before has left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from lightning_moe_ckpt.session import RngState, differs

log = logging.getLogger(__name__)

_MOST = 1_000
"""States that are kept of one epoch; each is several KB in every journal."""

_STATE_NBYTES = 2**13

NO_FETCHES: dict[str, Any] = {"states": {}, "restarts": {}}
"""What is known from journals that did not keep any."""


class FetchLog:
    """What the fetches of the epoch under way have left behind."""

    def __init__(self) -> None:
        self._said = False
        self.begin()

    def begin(self) -> None:
        """A new iterator is about to be made."""
        self._index = 0
        self._states: dict[int, RngState] = {}
        self._restarts: dict[int, int] = {}
        self._after: RngState | None = None

    def fetched(
        self, before: RngState, after: Callable[[], RngState], *, restarted: Sequence[int], carries: bool
    ) -> None:
        """A batch was fetched.

        Args:
            before: random state before it.
            after: gives the one after it.
            restarted: loaders that began anew in it.
            carries: whether later fetches may depend on what this one drew.
        """
        index, self._index = self._index, self._index + 1
        last, self._after = self._after, after() if carries else None
        if index == 0:
            return  # known as the first of the epoch
        for loader in restarted:
            self._restarts[loader] = index
        apart = before if restarted else _apart(last, before, self._after) if self._after is not None else {}
        if apart:
            self._keep(index, apart)
        if restarted and not carries:
            self._states = {at: self._states[at] for at in sorted({*self._restarts.values()}) if at in self._states}

    def take(self) -> dict[str, Any]:
        """For the journal."""
        return {"states": dict(self._states), "restarts": dict(self._restarts)}

    def restore(self, taken: dict[str, Any], *, num_fetched: int) -> None:
        """Go on behind `num_fetched` fetches."""
        self.begin()
        self._index = num_fetched
        self._states, self._restarts = dict(taken["states"]), dict(taken["restarts"])

    @staticmethod
    def room(*, num_loaders: int, num_batches: float, carries: bool) -> int:
        """Bytes that an epoch may add to a journal."""
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
    """State of the generators that the fetch drew from and that are not where the fetch before has left them."""
    return {
        name: state
        for name, state in before.items()
        if differs(after[name], state) and (last is None or differs(last[name], state))
    }
