"""Encode a segment by gradients: a holder of the previous boundary's segment rebuilds this segment, byte for byte.

The optimizer takes one step between two boundaries. For a part whose state is in both segments, only the step's
gradient is sent, as the optimizer consumed it, with the step's settings. The receiver repeats the step on the parameter
and moments in the previous segment. A part without gradient was not stepped, and nothing is sent for it. All other
tensors are sent whole, and so are parts without state in the previous segment.

```text
recipe   encoding of each part, settings of the step, difference of the headers, a digest of all this
payload  whole tensors, in runs, in the order of the file, without zeros at its end; then gradients, each at a multiple of 64 bytes
```

Invariant: only the marker's digest of the whole segment decides whether a rebuilt segment is right. A copy with another
digest is refused: another node's processor may round differently, and users may edit weights.

Gradients rounded to bfloat16 lead to slightly different bytes, and the error grows with every step. In such a segment
digests check the gradients and the tensors sent whole; its marker describes the rebuilt bytes. In an *audit* the whole
segment is sent too, and the receiver reports the rebuilt state's distance from it.

`DeltaChain` decides what is sent in place of whole segments, and when. A delta leads from the newest generation that
every holder has whole to the next boundary. After a generation that was skipped, failed or not taken, the next
generation is sent whole; so it is after a rebuilt copy with other bytes than its owner's. If the first delta after that
is refused again, only whole segments are sent from there on. With rounded gradients an audit follows after a fixed
number of generations, and leaves the copies exact.

Source: MOETION (2024), Sec. 5.2, Algorithm 3.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
import xxhash
from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.native import AdamState, replay_adam
from lightning_moe_ckpt.policies import Deltas
from lightning_moe_ckpt.storage import GenerationId, RankMarker, SegmentLayout, dtype_code, dtype_of
from lightning_moe_ckpt.tiers._delta_plan import (
    LITERAL,
    STEPPED,
    UNCHANGED,
    DeltaPlan,
    Gradients,
    Run,
    SegmentIndex,
    SteppedPart,
    StepSettings,
    gradient_nbytes,
    index_of,
    plan_delta,
    same_part,
    wrong_delta,
)
from lightning_moe_ckpt.tiers._peer_wire import compress, decompress, inflate
from lightning_moe_ckpt.tiers._sealed import SealedSegment

log = rank_logger(__name__)

_LENGTHS = struct.Struct("<III")
_DIGEST_NBYTES = 16
_MAX_SETTINGS = 256 - STEPPED
_MAX_DOCUMENT_NBYTES = 2**17
"""Most bytes of a recipe's document, which lists fewer than 256 settings."""
_BLOCK_NUMEL = 2**16
"""Elements copied and stepped at a time: few enough to be in the cache still for the step."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """Facts about the previous segment, kept by the sender in place of the segment's bytes."""

    header: bytes
    present: bytes
    """One byte per part: 1 if the optimizer had state, else 0."""

    @classmethod
    def of(cls, segment_U8: Tensor) -> Baseline:
        """Return the facts about a segment with final bytes."""
        segment = segment_U8.numpy()
        header = SegmentLayout.header_in(segment.data)
        return cls(header, index_of(header).present(segment))


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """Message sent in place of a segment."""

    recipe: bytes
    payload: Sequence[Tensor]
    """uint8 views of the segment, then of the gradients; nothing is copied."""
    exact: bool = True
    """Whether the receiver gets exactly the segment's bytes."""

    @property
    def payload_nbytes(self) -> int:
        """Bytes of the payload, without the recipe."""
        return sum(view.numel() for view in self.payload)


def encode_delta(
    base: Baseline, segment_U8: Tensor, gradients: Gradients, *, audit: bool = False, mirrored: Run | None = None
) -> EncodedDelta:
    """Encode a segment by the optimizer step that led to it from the previous boundary's, which the receiver has.
    Neither the segment, all bytes of the file, nor the gradients may change until all is sent. With `audit` the whole
    segment is sent too. The receiver has the run `mirrored` from elsewhere.
    """
    now = Baseline.of(segment_U8)
    settings: dict[StepSettings, int] = {}
    codes = bytes(_codes(base, now, gradients, settings, mirrored or (0, 0)))
    zeros = index_of(now.header).zeros(segment_U8)
    plan = plan_delta(base.header, now.header, codes, gradients.dtype, whole=audit, mirrored=mirrored, zeros=zeros)
    literal = [segment_U8[start:stop] for start, stop in plan.literal]
    stepped = [gradients.area[start:stop] for start, stop in _gradient_runs(plan, gradients)]
    exact = audit or gradients.dtype is torch.float32
    document = {
        "settings": [setting.described() for setting in list(settings)[:_MAX_SETTINGS]],
        "dtype": dtype_code(gradients.dtype),
        "audit": audit,
        "zeros": zeros,
        "digest": None if gradients.dtype is torch.float32 else _digest(stepped).hexdigest(),
    }
    recipe = _pack(json.dumps(document).encode(), codes, compress(now.header, base.header))
    return EncodedDelta(recipe, [*literal, *stepped], exact)


class DeltaDecoder:
    """Rebuild one segment from the previous one, with which `base_U8` begins, in place, while the payload arrives.
    Raises `Corrupt` if the recipe, from `encode_delta`, is damaged, or was made for another previous segment.

    `out_U8` has room for the segment and the gradients behind it, as the sender's; its run `mirrored` is filled
    already, and not sent.
    """

    def __init__(self, recipe: bytes, base_U8: Tensor, out_U8: Tensor, mirrored: Run | None = None) -> None:
        base_header = SegmentLayout.header_in(base_U8.numpy().data)
        document, codes, compressed = _unpack(recipe, out_U8.numel())
        self._settings, self.dtype, self._wanted, audit, zeros = _read(document)
        header = decompress(compressed, base_header, out_U8.numel())
        self.plan = plan_delta(base_header, header, codes, self.dtype, whole=audit, mirrored=mirrored, zeros=zeros)
        self._base, self._out = base_U8, out_U8
        self._received = self._num_stepped = 0
        self._digest = xxhash.xxh3_128()
        self.drift: tuple[float, ...] = (0.0, 0.0) if self.plan.whole else ()
        """Largest differences found by an audit, in parameters and in moments, each relative to its tensor's largest
        element. Empty without an audit."""
        if max(codes, default=0) >= STEPPED + len(self._settings) or out_U8.numel() < self.plan.nbytes:
            raise wrong_delta()
        self.plan.layout.write_header(out_U8)
        self.segment[self.plan.layout.nbytes - zeros :].zero_()
        out, base = out_U8.numpy(), base_U8.numpy()
        for source, destination, nbytes in self.plan.kept:
            out[destination : destination + nbytes] = base[source : source + nbytes]

    @property
    def exact(self) -> bool:
        """Return whether the rebuilt bytes have to equal the sender's: gradients are in float32, or the segment is sent whole too."""
        return self.plan.whole or self.dtype is torch.float32

    @property
    def whole(self) -> bool:
        """Return whether the segment is rebuilt."""
        return self._received == self.plan.payload_nbytes

    def expect_gradients(self) -> None:
        """Raise `Corrupt` if the gradients differ from the recipe's digest, which only rounded gradients have."""
        if self._wanted is not None and self._digest.hexdigest() != self._wanted:
            raise Corrupt("gradients are not those that were sent. The next generation comes whole.")

    @property
    def segment(self) -> Tensor:
        """Memory for the segment, uint8."""
        return self._out[: self.plan.layout.nbytes]

    def place(self, offset: int, nbytes: int) -> Tensor:
        """Return the memory for the payload's next bytes; uint8, shape `[nbytes]`. Raises `Corrupt` if these are not
        the next bytes, or they do not belong in one place.
        """
        if offset != self._received or nbytes <= 0:
            raise wrong_delta()
        start, stop = self.plan.place(offset, nbytes)
        return self._out[start:stop]

    def arrived(self, nbytes: int) -> None:
        """Note that the next bytes are in place, and take the steps whose gradients are complete."""
        if self._wanted is not None and self._received >= self.plan.literal_nbytes:
            start, stop = self.plan.place(self._received, nbytes)
            self._digest.update(self._out[start:stop].numpy().data)
        self._received += nbytes
        stepped = self.plan.stepped
        while self._num_stepped < len(stepped) and stepped[self._num_stepped].end <= self._received:
            self._step(stepped[self._num_stepped])
            self._num_stepped += 1

    def _step(self, part: SteppedPart) -> None:
        settings, number = self._settings[part.settings], self._count(part)
        begin = self.plan.gradients_at + part.gradient
        gradient = self._out[begin : begin + part.numel * self.dtype.itemsize].view(self.dtype)
        peaks = [(0.0, 0.0)] * len(part.state)
        for first in range(0, part.numel, _BLOCK_NUMEL):
            last = min(first + _BLOCK_NUMEL, part.numel)
            state = [self._moved(*offsets, first, last) for offsets in part.state]
            replay_adam(AdamState(*state), [settings.step(gradient[first:last], number)], threads=1)
            if self.drift:
                wanted = [_floats(self._out, offset, first, last) for _, offset in part.state]
                peaks = list(map(_with_block, peaks, state, wanted))
        if self.drift:
            param, *moments = [difference / value if value else float(difference > 0) for difference, value in peaks]
            self.drift = max(self.drift[0], param), max(self.drift[1], *moments)

    def _count(self, part: SteppedPart) -> int:
        """Return the step's number, and store it, except in an audit. Raises `Corrupt` if the one before is no whole number."""
        (source, destination), nbytes = part.step, part.step_dtype.itemsize
        before = self._base[source : source + nbytes].view(part.step_dtype)
        if not self.plan.whole:
            self._out[destination : destination + nbytes].view(part.step_dtype).copy_(before + 1)
        if not ((number := float(before) + 1) >= 1 and number.is_integer()):
            raise wrong_delta()
        return int(number)

    def _moved(self, source: int, destination: int, first: int, last: int) -> Tensor:
        """Copy elements of the previous segment's state to their new place and return them; in an audit, a copy by itself."""
        base = _floats(self._base, source, first, last)
        return base.clone() if self.plan.whole else _floats(self._out, destination, first, last).copy_(base)


def _floats(memory_U8: Tensor, offset: int, first: int, last: int) -> Tensor:
    """Return elements of the float32 tensor at `offset`."""
    return memory_U8[offset + 4 * first : offset + 4 * last].view(torch.float32)


def _with_block(peak: tuple[float, float], found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Return a tensor's largest difference and largest value so far, with one more block."""
    return max(peak[0], float((found - wanted).abs().max())), max(peak[1], float(wanted.abs().max()))


def _digest(views: Sequence[Tensor]) -> xxhash.xxh3_128:
    digest = xxhash.xxh3_128()
    for view in views:
        digest.update(view.numpy().data)
    return digest


def _codes(
    base: Baseline, now: Baseline, gradients: Gradients, settings: dict[StepSettings, int], mirrored: Run
) -> Iterator[int]:
    """Yield the code of each part's encoding; fill `settings` with the numbered settings in use."""
    before, index = index_of(base.header), index_of(now.header)
    for prefix, present in zip(index.prefixes, now.present, strict=True):
        part = gradients.parts.get(prefix)
        there = index.layout.spans[f"{prefix}/param"].offset
        if part is None or mirrored[0] <= there < mirrored[1] or not same_part(before, index, prefix):
            yield LITERAL
        elif part.settings is None:
            yield UNCHANGED if present == _present(base, before, prefix) else LITERAL
        elif present and _present(base, before, prefix) and index.can_step(prefix):
            number = settings.setdefault(part.settings, len(settings))
            yield STEPPED + number if number < _MAX_SETTINGS else LITERAL
        else:
            yield LITERAL


def _present(base: Baseline, index: SegmentIndex, prefix: str) -> int:
    return base.present[index.position[prefix]]


def _gradient_runs(plan: DeltaPlan, gradients: Gradients) -> Iterator[Run]:
    """Yield runs of the sender's memory; adjacent gradients share one run."""
    start = stop = -1
    for part in plan.stepped:
        if (offset := gradients.parts[part.prefix].offset) != stop:
            if start >= 0:
                yield start, stop
            start = offset
        stop = offset + gradient_nbytes(part.numel, gradients.dtype)
    if start >= 0:
        yield start, stop


def _pack(document: bytes, codes: bytes, compressed: bytes) -> bytes:
    parts = [zlib.compress(document), zlib.compress(codes), compressed]
    body = _LENGTHS.pack(*map(len, parts)) + b"".join(parts)
    return body + xxhash.xxh3_128_digest(body)


def _unpack(recipe: bytes, most: int) -> tuple[bytes, bytes, bytes]:
    """Return document, part codes and header. A segment of `most` bytes has no more parts. Raises `Corrupt`."""
    body, digest = recipe[:-_DIGEST_NBYTES], recipe[-_DIGEST_NBYTES:]
    if len(body) < _LENGTHS.size or xxhash.xxh3_128_digest(body) != digest:
        raise Corrupt("the recipe of a delta is not the one that was sent. The next generation comes whole.")
    sizes = _LENGTHS.unpack_from(body)
    document, codes, compressed = (body[a:b] for a, b in pairwise(accumulate([_LENGTHS.size, *sizes])))
    return inflate(document, _MAX_DOCUMENT_NBYTES), inflate(codes, most), compressed


def _read(document: bytes) -> tuple[list[StepSettings], torch.dtype, str | None, bool, int]:
    """Return settings, the gradients' dtype and digest, whether the whole segment is sent too, and the zeros not sent.
    Raises `Corrupt`.
    """
    try:
        found = json.loads(document)
        settings = [StepSettings(**setting) for setting in found["settings"]]
        dtype, digest, audit, zeros = dtype_of(found["dtype"]), found["digest"], found["audit"], found["zeros"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise wrong_delta() from error
    # No recipe names a kernel: which of torch's kernels repeats a step here nobody has judged.
    numbers = ["" if key == "kernel" else value for setting in found["settings"] for key, value in setting.items()]
    known = dtype in {torch.float32, torch.bfloat16} and isinstance(digest, str | None) and isinstance(audit, bool)
    if not (known and isinstance(zeros, int)) or not all(isinstance(value, int | float) for value in numbers):
        raise wrong_delta()
    return settings, dtype, digest, audit, zeros


# -- when

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
    """Track the generations of one rank as its holders have them. Only the sending thread uses it."""

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
        """Return the delta for all bytes of the next segment, which is digested; `None` if the segment has to be sent
        whole. Holders have filled its run `mirrored`.
        """
        sending = _Sent(generation=segment.generation, baseline=Baseline.of(view_U8), nbytes=view_U8.numel())
        self._sending = sending
        base = self._newest
        if base is None or self.given_up or segment.step_record is None or not _follows(base.generation, segment):
            return None
        if (gradients := segment.step_record.gradients()) is None:
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
        """Note that every holder has the generation under way whole, in so many bytes. `drift` has the differences
        found by an audit, in parameters and in moments; empty without an audit.
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
        self.figures = replace(self.figures, **{name: getattr(self.figures, name) + n for name, n in more.items()})

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
