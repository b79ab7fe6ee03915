"""Decide what the peer tier sends in place of whole segments, and when.

A delta leads from the newest generation that every holder has whole to the next boundary. After a generation that was
skipped, failed or not taken, the next generation is sent whole; so it is after a rebuilt copy with other bytes than its
owner's. If the first delta after that is refused again, only whole segments are sent from there on: two nodes'
processors, or an optimizer on a GPU, may round differently.

With gradients rounded to bfloat16, copies only come close to their owner's state. After a fixed number of generations
an audit sends both, reports the difference, and leaves the copy exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.policies import Deltas
from lightning_moe_ckpt.storage import GenerationId, RankMarker
from lightning_moe_ckpt.tiers._delta import Baseline, EncodedDelta, encode_delta
from lightning_moe_ckpt.tiers._delta_plan import Run
from lightning_moe_ckpt.tiers._sealed import SealedSegment

log = rank_logger(__name__)

_STRIKES = 2
"""Deltas refused without an accepted delta in between, after which no more are sent."""


@dataclass(frozen=True, kw_only=True)
class DeltaFigures:
    """Cost of this rank's copies on other nodes, in bytes per copy; counts generations that every holder has."""

    generations: int = 0
    """Generations sent as a step's gradients."""
    nbytes: int = 0
    """Bytes sent for `generations`."""
    segments_nbytes: int = 0
    """Bytes of their segments and markers, the cost of sending them whole."""
    whole_generations: int = 0
    """Generations sent whole."""
    whole_nbytes: int = 0
    refused: int = 0
    """Generations sent as gradients from which a holder rebuilt other bytes than this rank's."""
    audits: int = 0
    """Generations sent both ways to measure the rounding error; counted as whole."""
    drift: float = 0.0
    """Largest difference in parameters found by audits, relative to a tensor's largest element."""
    drift_moments: float = 0.0
    """Largest difference in the optimizer's moments, relative to a tensor's largest element."""

    @property
    def share(self) -> float:
        """Bytes of deltas relative to the segments replaced; 0 before the first delta."""
        return self.nbytes / self.segments_nbytes if self.segments_nbytes else 0.0


@dataclass(kw_only=True, slots=True)
class _Sent:
    generation: GenerationId
    baseline: Baseline
    nbytes: int
    """Segment size in bytes."""
    marker: bytes = b""
    by_delta: bool = False
    exact: bool = True
    """Whether holders then have this rank's bytes."""
    audit: bool = False


class DeltaChain:
    """Track the generations of one rank as its holders have them. Only the sending thread uses it.

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
        """Return the newest generation that every holder has whole; `None` before the first."""
        return None if self._newest is None else self._newest.generation

    @property
    def marker(self) -> bytes | None:
        """Return the marker of `newest` if the segment under way is sent as a delta from it, else `None`."""
        return self._newest.marker if self._newest and self._sending and self._sending.by_delta else None

    def encode(self, segment: SealedSegment, view_U8: Tensor, mirrored: Run | None = None) -> EncodedDelta | None:
        """Return the delta for the next segment, which is digested; `None` if the segment has to be sent whole.

        Args:
            segment: the segment, as the tier takes it.
            view_U8: all bytes of the segment.
            mirrored: run of the segment that holders have filled.
        """
        sending = _Sent(generation=segment.generation, baseline=Baseline.of(view_U8), nbytes=view_U8.numel())
        self._sending = sending
        base = self._newest
        if base is None or self.given_up or segment.step_record is None or not _follows(base.generation, segment):
            return None
        gradients = segment.step_record.gradients()
        if gradients is None:
            return None
        sending.audit = self._deltas.kind == "bf16" and self._rounded + 1 >= self._deltas.resync_every
        delta = encode_delta(base.baseline, view_U8, gradients, audit=sending.audit, mirrored=mirrored)
        sending.exact = delta.exact
        return delta

    def offered(self, refusal: str | None) -> bool:
        """Note the holders' answer to a delta; return whether the delta can be sent."""
        assert self._sending is not None
        if refusal is not None:
            log.info("%s is sent whole: %s", self._sending.generation, refusal)
        self._sending.by_delta = refusal is None
        return refusal is None

    def whole(self, marker: RankMarker, nbytes: int, drift: Sequence[float] = ()) -> None:
        """Note that every holder has the generation under way whole.

        Args:
            marker: this rank's marker of the generation.
            nbytes: bytes sent per holder.
            drift: differences found by an audit, in parameters and in moments; empty without an audit.
        """
        sent = self._sending
        assert sent is not None
        data = marker.to_bytes()
        self._rounded = 0 if sent.exact or not sent.by_delta else self._rounded + 1
        self._strikes = 0 if sent.by_delta else self._strikes
        if sent.by_delta and not sent.audit:
            self._count(generations=1, nbytes=nbytes, segments_nbytes=sent.nbytes + len(data))
        else:
            self._count(whole_generations=1, whole_nbytes=nbytes)
        if drift:
            self._audited(sent.generation, *drift)
        sent.marker = data
        self._newest, self._sending = sent, None

    def _count(self, **more: int) -> None:
        self.figures = replace(
            self.figures, **{name: getattr(self.figures, name) + each for name, each in more.items()}
        )

    def _audited(self, generation: GenerationId, params: float, moments: float) -> None:
        self._count(audits=1)
        now = self.figures
        self.figures = replace(now, drift=max(now.drift, params), drift_moments=max(now.drift_moments, moments))
        log.info(
            "%s: copies on other nodes, of %d generations of gradients rounded to bfloat16, had come to differ by %.1e in "
            "parameters and %.1e in moments, relative to the largest element; they are exact again",
            *(generation, self._deltas.resync_every, params, moments),
        )

    def refused(self, reason: str) -> None:
        """Count a delta from which a holder rebuilt other bytes. At `_STRIKES` in a row warn and send no more."""
        sent, self._sending = self._sending, None
        if sent is None or not sent.by_delta:
            return
        self._strikes += 1
        self.given_up = self._strikes >= _STRIKES
        self._count(refused=1)
        if self.given_up:
            log.warning(
                "steps of the optimizer cannot be repeated on other nodes to the last bit: generations are sent there "
                "whole from here on. Set delta=None to keep no gradients for that. %s",
                reason,
            )
        elif self.figures.refused == 1:
            log.warning("a copy was rebuilt from gradients and is not as here; the next one is sent whole: %s", reason)


def _follows(base: GenerationId, segment: SealedSegment) -> bool:
    """Return whether exactly one step lies between the base and the segment, its generation's only boundary."""
    one = segment.step == segment.generation.step == base.step + 1
    return one and segment.generation.incarnation == base.incarnation
