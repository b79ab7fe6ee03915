"""Count and log generations that a tier skips, and windows without a generation.

A free tier takes the newest complete generation; generations completed while it was busy are never stored there. One
line is logged when such a stretch begins, at its second generation since a single skip is noise. Another line, with the
numbers, is logged at the stretch's end: when eight generations in a row were taken, or at the end of training. Such
stretches are routine where storage is slow, and only make the newest stored generation older, so they are no warning.

A window without a generation concerns no tier. A single one is noise too; several in a row mean that a failure now
would cost everything since then, which is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.storage import GenerationId

log = rank_logger(__name__)

_NOISE = 1
"""Skipped generations in a row that are not logged; the metric counts them."""
_CALM = 8
"""Generations taken in a row that end a stretch, so that occasional skips are one stretch."""
NO_NOISE = 3
"""Windows in a row without a generation that are logged as an error."""


@dataclass(slots=True)
class _Stretch:
    first: GenerationId
    last: GenerationId
    num_skipped: int = 0
    num_taken: int = 0
    num_calm: int = 0
    """Generations taken since the last skip."""


class MissedWindows:
    """Count of windows in a row without a generation; the same on all ranks."""

    def __init__(self) -> None:
        self.in_a_row = 0
        """Windows since the newest generation."""
        self._newest: int | None = None

    @property
    def worth_a_word(self) -> int:
        """Windows in a row without a generation; 0 while their number may be noise."""
        return self.in_a_row if self.in_a_row >= NO_NOISE else 0

    def add(self, step: int, cause: str) -> None:
        """Count the window at boundary `step`, which gives no generation; `cause` includes the remedy."""
        self.in_a_row += 1
        if self.in_a_row == NO_NOISE:
            since = "since the start" if self._newest is None else f"since that of step {self._newest}"
            log.error(
                "%d windows in a row up to step %d gave no checkpoint, and there is none in any tier %s: %s Training goes on, "
                "and a failure would cost all of that",
                *(self.in_a_row, step, since, cause),
            )

    def taken(self, step: int) -> None:
        """Note a generation of boundary `step`."""
        self._newest = step
        self.close()

    def close(self) -> None:
        """End the row of windows, with a log line if the row was logged before."""
        number, self.in_a_row = self.in_a_row, 0
        if number >= NO_NOISE:
            log.warning("checkpoints are taken again: %d windows in a row gave none", number)


class SkipCounter:
    """Count of the generations that one tier has skipped.

    Args:
        tier: the tier's name, for messages.
    """

    def __init__(self, tier: str) -> None:
        self.total = 0
        """Generations skipped so far."""
        self._tier = tier
        self._stretch: _Stretch | None = None

    def skipped(self, generation: GenerationId, *, meant: bool = False) -> None:
        """Count a generation never taken: a newer one is complete. Logs nothing if the tier is `meant` to rest."""
        if meant:
            self.total += 1
            return
        if self._stretch is None:
            self._stretch = _Stretch(generation, generation)
        self.total += 1
        self._stretch.num_skipped += 1
        self._stretch.last, self._stretch.num_calm = generation, 0
        if self._stretch.num_skipped == _NOISE + 1:
            log.info(
                "%s is slower than training: generations from %s on are skipped, the newest goes first whenever it is "
                "free. Take generations less often if that goes on",
                *(self._tier, self._stretch.first),
            )

    def taken(self) -> None:
        """Count a generation that the tier takes."""
        stretch = self._stretch
        if stretch is None:
            return
        stretch.num_taken, stretch.num_calm = stretch.num_taken + 1, stretch.num_calm + 1
        if stretch.num_calm == _CALM:
            stretch.num_taken -= _CALM  # taken after the stretch, not during it
            self.close()

    def close(self) -> None:
        """End the stretch, if there is one."""
        stretch, self._stretch = self._stretch, None
        if stretch is not None and stretch.num_skipped > _NOISE:
            log.info(
                "%s was slower than training: %d generations were skipped, from %s to %s, and %d taken meanwhile",
                *(self._tier, stretch.num_skipped, stretch.first, stretch.last, stretch.num_taken),
            )
