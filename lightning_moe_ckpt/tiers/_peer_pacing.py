"""How many bytes of a transfer may go in each step of training, so that it takes the steps it has, and no fewer.

A transfer that runs as fast as the network lets it takes bandwidth and memory traffic from the training it protects.
So each step gets an equal part of what is left: `ceil(bytes left / steps left)`. Steps that were slow to send leave more
to those after them; once the steps are used up, or somebody waits for the transfer, the rest goes at once.

Source: TierCheck (arXiv 2605.17821), Sec. 3.2, asymmetric transmission scheduling.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Pacer:
    """Deals out bytes. The training thread calls `step`, one sending thread the rest."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now = 0
        self._deadline = 0
        self._known = self._seen = self._announced = self._seen_nbytes = 0
        self._dealt_at, self._allowance, self._spent = -1, 0, 0
        self._hurried = False

    # -- from the training thread

    def step(self) -> None:
        """A step of training has ended. Takes constant time."""
        with self._changed:
            self._now += 1
            self._changed.notify_all()

    def hurry(self) -> None:
        """Somebody waits for the transfer under way: what is left of it goes at once."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def wake(self) -> None:
        """What `take` was told is wanted has changed."""
        with self._changed:
            self._changed.notify_all()

    def begin(self, *, num_segments: int, num_steps: int) -> None:
        """A transfer begins, of `num_segments` parts of about one size, which has `num_steps` steps from here on."""
        with self._changed:
            self._deadline = self._now + num_steps
            self._known = self._seen = self._seen_nbytes = 0
            self._announced = num_segments
            self._dealt_at, self._hurried = -1, False

    def expect(self, nbytes: int) -> None:
        """A part of the transfer is there; those that are still to come are taken to be of the mean size."""
        with self._changed:
            self._known += nbytes
            self._seen += 1
            self._seen_nbytes += nbytes

    # -- from the sending thread

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
            while wanted():
                nbytes = most if self._hurried else min(most, self._left())
                if nbytes > 0:
                    self._spent += nbytes
                    self._known -= nbytes
                    return nbytes
                self._changed.wait()
            return 0

    @property
    def allowance(self) -> int:
        """Bytes that the step under way was given, per copy; 0 before anything was sent."""
        with self._changed:
            return self._allowance

    def _left(self) -> int:
        """The lock is held."""
        if self._dealt_at != self._now:
            to_come = (self._announced - self._seen) * self._seen_nbytes // max(1, self._seen)
            steps_left = max(1, self._deadline - self._now)
            self._allowance, self._spent = -(-(self._known + to_come) // steps_left), 0
            self._dealt_at = self._now
        return self._allowance - self._spent
