"""What the peer tier may send in the place of whole segments, and when: see `tiers._delta`.

A delta is of the newest generation that every holder said to have whole, and leads from its boundary to the next one. A
generation that was skipped, failed or was not taken ends that: the next one goes whole. So does the one after a copy
that was rebuilt and had other bytes than its owner's. If the first delta after that is refused again, nothing but whole
segments is sent from there on: the processors of two nodes, or an optimizer on a GPU, may round otherwise.

With gradients rounded to bfloat16 copies are only near to their owner's state. Every so many generations an audit sends
both, tells how near, and leaves the copy exact.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_moe_ckpt.policies import Deltas
from lightning_moe_ckpt.storage import GenerationId, RankMarker
from lightning_moe_ckpt.tiers._delta import Baseline, EncodedDelta, encode_delta
from lightning_moe_ckpt.tiers._sealed import SealedSegment

log = logging.getLogger(__name__)

_STRIKES = 2
"""Deltas refused without one that was right in between, after which no more are sent."""


@dataclass(frozen=True, kw_only=True)
class DeltaFigures:
    """What copies on other nodes have cost in bytes, on this rank and per copy; generations that every holder has."""

    generations: int = 0
    """Sent as gradients of a step."""
    nbytes: int = 0
    """Sent for them, all in all."""
    segments_nbytes: int = 0
    """Of their segments and markers, which sending them whole would have taken."""
    whole_generations: int = 0
    """Sent as they are."""
    whole_nbytes: int = 0
    refused: int = 0
    """Generations of gradients that did not lead a holder to this rank's bytes."""
    audits: int = 0
    """Generations sent in both ways, which count as whole ones, to see what rounding gradients has done."""
    drift: float = 0.0
    """The most that was found by them in parameters: difference relative to the largest element of a tensor."""
    drift_moments: float = 0.0
    """The same of the optimizer's moments."""

    @property
    def share(self) -> float:
        """Bytes of deltas relative to what they stand for; 0 if none was sent."""
        return self.nbytes / self.segments_nbytes if self.segments_nbytes else 0.0


@dataclass(frozen=True, kw_only=True)
class _Sent:
    generation: GenerationId
    baseline: Baseline
    nbytes: int
    """Of the segment."""
    marker: bytes = b""
    by_delta: bool = False
    exact: bool = True
    """Whether holders have this rank's bytes then."""
    audit: bool = False


class DeltaChain:
    """Generations of one rank, as its holders have them. Used by the thread that sends.

    Args:
        deltas: how gradients are sent.
    """

    def __init__(self, deltas: Deltas) -> None:
        self._deltas, self._rounded = deltas, 0  # generations since holders had this rank's bytes
        self.figures = DeltaFigures()
        self.given_up = False
        self._newest: _Sent | None = None
        self._sending: _Sent | None = None
        self._strikes = 0

    @property
    def newest(self) -> GenerationId | None:
        """What every holder has whole."""
        return None if self._newest is None else self._newest.generation

    @property
    def marker(self) -> bytes | None:
        """Of that, if what is being sent is told by its difference from it."""
        return self._newest.marker if self._newest and self._sending and self._sending.by_delta else None

    def encode(self, segment: SealedSegment, view_U8: Tensor) -> EncodedDelta | None:
        """The segment that is sent next, as a delta.

        Args:
            segment: digested.
            view_U8: all bytes of it.

        Returns:
            `None` if it has to be sent as it is.
        """
        self._sending = _Sent(generation=segment.generation, baseline=Baseline.of(view_U8), nbytes=view_U8.numel())
        base = self._newest
        if base is None or self.given_up or segment.step_record is None or not _follows(base.generation, segment):
            return None
        gradients = segment.step_record.gradients()
        if gradients is None:
            return None
        audit = self._deltas.kind == "bf16" and self._rounded + 1 >= self._deltas.resync_every
        delta = encode_delta(base.baseline, view_U8, gradients, audit=audit)
        self._sending = replace(self._sending, exact=delta.exact, audit=audit)
        return delta

    def offered(self, refusal: str | None) -> bool:
        """Holders were told of the delta; whether it can be sent."""
        assert self._sending is not None
        if refusal is not None:
            log.info("%s is sent whole: %s", self._sending.generation, refusal)
        self._sending = replace(self._sending, by_delta=refusal is None)
        return refusal is None

    def whole(self, marker: RankMarker, nbytes: int, drift: Sequence[float] = ()) -> None:
        """Every holder has what was sent, with this marker.

        Args:
            marker: of this rank.
            nbytes: that it took per holder.
            drift: what an audit has found.
        """
        sent = self._sending
        assert sent is not None
        data, now = marker.to_bytes(), self.figures
        self._rounded = 0 if sent.exact or not sent.by_delta else self._rounded + 1
        self._strikes = 0 if sent.by_delta else self._strikes
        if sent.by_delta and not sent.audit:
            self.figures = replace(
                now,
                generations=now.generations + 1,
                nbytes=now.nbytes + nbytes,
                segments_nbytes=now.segments_nbytes + sent.nbytes + len(data),
            )
        else:
            self.figures = replace(
                now, whole_generations=now.whole_generations + 1, whole_nbytes=now.whole_nbytes + nbytes
            )
        if drift:
            self._audited(sent.generation, *drift)
        self._newest, self._sending = replace(sent, marker=data), None

    def _audited(self, generation: GenerationId, params: float, moments: float) -> None:
        now = self.figures
        self.figures = replace(
            now, audits=now.audits + 1, drift=max(now.drift, params), drift_moments=max(now.drift_moments, moments)
        )
        log.info(
            "%s: copies on other nodes, of %d generations of gradients rounded to bfloat16, had come to differ by %.1e in "
            "parameters and %.1e in moments, relative to the largest element; they are exact again",
            *(generation, self._deltas.resync_every, params, moments),
        )

    def refused(self, reason: str) -> None:
        """A holder has something else than what was sent."""
        sent, self._sending = self._sending, None
        if sent is None or not sent.by_delta:
            return
        self._strikes += 1
        self.given_up = self._strikes >= _STRIKES
        self.figures = replace(self.figures, refused=self.figures.refused + 1)
        if self.given_up:
            log.warning(
                "steps of the optimizer cannot be repeated on other nodes to the last bit: generations are sent there "
                "whole from here on. Set delta=None to keep no gradients for that. %s",
                reason,
            )
        elif self.figures.refused == 1:
            log.warning("a copy was rebuilt from gradients and is not as here; the next one is sent whole: %s", reason)


def _follows(base: GenerationId, segment: SealedSegment) -> bool:
    """Whether one step lies between them, and nothing else of either generation."""
    one = segment.step == segment.generation.step == base.step + 1
    return one and segment.generation.incarnation == base.incarnation
