"""Limit the bytes that a transfer sends in each step of training, so that it uses all the steps it has.

A transfer that runs as fast as the network lets it takes bandwidth and memory traffic from the training it protects.
Each step therefore sends an equal part of the rest: `ceil(bytes left / steps left)`. Slow steps leave more for those
after them. Once the steps are used up, or something waits for the transfer, the rest goes at once. A transfer that begins
before the previous one has ended waits for it; its steps pass meanwhile.

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
    """Bytes that are available and not sent."""
    seen: int = 0
    seen_nbytes: int = 0
    hurried: bool = False

    def left(self) -> int:
        return self.known + (self.announced - self.seen) * self.seen_nbytes // max(1, self.seen)


class Pacer:
    """Grant bytes to one sending thread, which ends transfers; the training thread begins them and counts steps."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now = 0
        self._transfers: deque[_Transfer] = deque()
        """Transfers in order; the first one is under way."""
        self._dealt_at, self._allowance, self._spent = -1, 0, 0
        self.waited_seconds = 0.0
        """Seconds for which the sending thread was not allowed to send."""

    # -- from the training thread

    def step(self) -> None:
        """Count a step of training that has ended, in constant time."""
        with self._changed:
            self._now += 1
            self._changed.notify_all()

    def hurry(self) -> None:
        """Send the rest of all transfers at once, because something waits for them."""
        with self._changed:
            for transfer in self._transfers:
                transfer.hurried = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Make `take` ask its `wanted` again."""
        with self._changed:
            self._changed.notify_all()

    def begin(self, *, num_segments: int, num_steps: int, name: Hashable = None) -> None:
        """Begin a transfer of `num_segments` segments of about equal size, which has `num_steps` steps from now on.

        It waits behind transfers that have not ended. It replaces one of the same name.
        """
        self.end(name)
        with self._changed:
            self._transfers.append(_Transfer(name=name, deadline=self._now + num_steps, announced=num_segments))

    def expect(self, nbytes: int, name: Hashable = None) -> None:
        """Add an available segment to a transfer that has not ended; later ones count with the mean size."""
        with self._changed:
            for transfer in self._transfers:
                if transfer.name == name:
                    transfer.known += nbytes
                    transfer.seen += 1
                    transfer.seen_nbytes += nbytes

    # -- from the sending thread

    def end(self, name: Hashable = None) -> None:
        """End a transfer that is complete or not wanted any more. Repeating this is allowed."""
        with self._changed:
            if self._transfers and self._transfers[0].name == name:
                self._dealt_at = -1
            self._transfers = deque(each for each in self._transfers if each.name != name)

    def resize(self, nbytes: int) -> None:
        """Set the bytes that the available segments of the current transfer take."""
        with self._changed:
            self._transfers[0].known = nbytes
            self._dealt_at = -1

    def take(self, most: int, wanted: Callable[[], bool]) -> int:
        """Wait until bytes may be sent.

        Args:
            most: most bytes to grant, at least 1.
            wanted: returns whether to go on waiting; see `wake`.

        Returns:
            Granted bytes, from 1 to `most`; 0 if they are not wanted any more.
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
        """Bytes granted in the current step, per replica; 0 before anything was sent."""
        with self._changed:
            return self._allowance

    def _left(self) -> int:
        """Return the bytes left in this step; the caller holds the lock."""
        transfer = self._transfers[0]
        if self._dealt_at != self._now:
            steps_left = max(1, transfer.deadline - self._now)
            self._allowance, self._spent = -(-transfer.left() // steps_left), 0
            self._dealt_at = self._now
        return self._allowance - self._spent
