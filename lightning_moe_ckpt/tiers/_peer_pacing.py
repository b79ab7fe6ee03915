"""How many bytes of a transfer may go in each step of training, so that it takes the steps it has, and no fewer.

A transfer that runs as fast as the network lets it takes bandwidth and memory traffic from the training it protects.
So each step gets an equal part of what is left: `ceil(bytes left / steps left)`. Steps that were slow to send leave more
to those after them; once the steps are used up, or somebody waits for the transfer, the rest goes at once. Where one
transfer begins before the last one has ended, it waits for its turn; its steps pass meanwhile.

Source: TierCheck (arXiv 2605.17821), Sec. 3.2, asymmetric transmission scheduling.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class _Transfer:
    name: Hashable
    deadline: int
    announced: int
    known: int = 0
    """Bytes that are there and not sent."""
    seen: int = 0
    seen_nbytes: int = 0
    hurried: bool = False

    def left(self) -> int:
        return self.known + (self.announced - self.seen) * self.seen_nbytes // max(1, self.seen)


class Pacer:
    """Deals out bytes. The training thread begins transfers and counts steps, one sending thread takes bytes and ends them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now = 0
        self._transfers: deque[_Transfer] = deque()
        """The first one is under way."""
        self._dealt_at, self._allowance, self._spent = -1, 0, 0
        self.waited_seconds = 0.0
        """For which the sending thread was not allowed to send."""

    # -- from the training thread

    def step(self) -> None:
        """A step of training has ended. Takes constant time."""
        with self._changed:
            self._now += 1
            self._changed.notify_all()

    def hurry(self) -> None:
        """Somebody waits for what was begun: what is left of it goes at once."""
        with self._changed:
            for transfer in self._transfers:
                transfer.hurried = True
            self._changed.notify_all()

    def wake(self) -> None:
        """What `take` was told is wanted has changed."""
        with self._changed:
            self._changed.notify_all()

    def begin(self, *, num_segments: int, num_steps: int, name: Hashable = None) -> None:
        """A transfer begins, of `num_segments` parts of about one size, which has `num_steps` steps from here on.

        Behind those that have not ended, but for one of the same name, whose place it takes.
        """
        self.end(name)
        with self._changed:
            self._transfers.append(_Transfer(name=name, deadline=self._now + num_steps, announced=num_segments))

    def expect(self, nbytes: int, name: Hashable = None) -> None:
        """A part of a transfer is there, if it has not ended; those still to come are taken to be of the mean size."""
        with self._changed:
            for transfer in self._transfers:
                if transfer.name == name:
                    transfer.known += nbytes
                    transfer.seen += 1
                    transfer.seen_nbytes += nbytes

    # -- from the sending thread

    def end(self, name: Hashable = None) -> None:
        """A transfer is through, or nobody wants it any more. Repeating this is allowed."""
        with self._changed:
            if self._transfers and self._transfers[0].name == name:
                self._dealt_at = -1
            self._transfers = deque(each for each in self._transfers if each.name != name)

    def resize(self, nbytes: int) -> None:
        """What is there of the transfer under way takes so many bytes."""
        with self._changed:
            self._transfers[0].known = nbytes
            self._dealt_at = -1

    def take(self, most: int, wanted: Callable[[], bool]) -> int:
        """Wait until bytes may be sent.

        Args:
            most: at least 1; how many the caller could use.
            wanted: whether to go on waiting; see `wake`.

        Returns:
            How many, from 1 to `most`; 0 if they are not wanted any more.
        """
        assert most > 0, "nothing to send"
        with self._changed:
            transfer = self._transfers[0]
            while wanted():
                nbytes = most if transfer.hurried else min(most, self._left())
                if nbytes > 0:
                    self._spent += nbytes
                    transfer.known -= nbytes
                    return nbytes
                since = time.perf_counter()
                self._changed.wait()
                self.waited_seconds += time.perf_counter() - since
            return 0

    @property
    def allowance(self) -> int:
        """Bytes that the step under way was given, per copy; 0 before anything was sent."""
        with self._changed:
            return self._allowance

    def _left(self) -> int:
        """The lock is held."""
        transfer = self._transfers[0]
        if self._dealt_at != self._now:
            steps_left = max(1, transfer.deadline - self._now)
            self._allowance, self._spent = -(-transfer.left() // steps_left), 0
            self._dealt_at = self._now
        return self._allowance - self._spent
