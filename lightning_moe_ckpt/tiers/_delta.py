"""A segment told by gradients: whoever has the segment of the boundary before rebuilds this one, byte for byte.

Between two boundaries the optimizer takes one step. So of a part whose state is in both segments only the gradient of
that step travels, as the optimizer consumed it, with the settings that the step had; parameter and moments are those of
the segment before, taken through the step again. A part that got no gradient was not stepped and takes nothing. All
other tensors travel as they are, and so does every part that the segment before has not, or has without state.

```text
recipe   which part is told how, settings of the step, what differs in the header, a digest of all this
payload  tensors as they are, in runs, in the order of the file; then gradients, each at a multiple of 64 bytes
```

Invariant: nothing here decides whether what was rebuilt is right. The marker's digest of the whole segment does, and a
copy that does not have it is refused: the processor of another node may round otherwise, and people edit weights.

Gradients that were rounded to bfloat16 lead elsewhere, a little further with every step. Of such a segment those tensors
are checked that travel as they are, and the gradients by a digest of their own; its marker says what was rebuilt. In an
*audit* the segment travels besides, and it is told how far the steps would have led from it.

Source: MOETION (2024), Sec. 5.2, Algorithm 3.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise

import torch
import xxhash
from torch import Tensor

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.native import AdamState, AdamStep, replay_adam
from lightning_moe_ckpt.storage import SegmentLayout, dtype_code, dtype_of
from lightning_moe_ckpt.tiers._delta_drift import Drift, PartDrift
from lightning_moe_ckpt.tiers._delta_plan import (
    LITERAL,
    STEPPED,
    UNCHANGED,
    DeltaPlan,
    Run,
    SegmentIndex,
    SteppedPart,
    gradient_nbytes,
    index_of,
    plan_delta,
    same_part,
    wrong_delta,
)
from lightning_moe_ckpt.tiers._squeeze import squeeze, unsqueeze

_LENGTHS = struct.Struct("<III")
_DIGEST_NBYTES = 16
_MAX_SETTINGS = 256 - STEPPED
_MAX_DOCUMENT_NBYTES = 2**17
"""Of the settings of a step, of which there are fewer than 256."""
_BLOCK_NUMEL = 2**16
"""Elements that are copied and stepped at a time: what was copied is in the cache when it is stepped."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings of Adam or AdamW in one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool

    def step(self, gradient: Tensor, number: int) -> AdamStep:
        """The step with that number, for `gradient`."""
        return AdamStep(gradient=gradient, step=number, **asdict(self))


@dataclass(frozen=True, slots=True)
class PartGradient:
    """What the optimizer did with one part of a segment in the step that led to it."""

    offset: int
    """Of its gradient in `Gradients.area`; a multiple of `GRADIENT_ALIGN`."""
    settings: StepSettings | None
    """Of the step; `None` if there was no gradient, and so no step of this part."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """What an optimizer step consumed, by part of the segment of the boundary after it."""

    area: Tensor
    """uint8; where they are."""
    dtype: torch.dtype
    """float32, or bfloat16 where rounding is allowed."""
    parts: Mapping[str, PartGradient]
    """By prefix of the names of their tensors; a part that is not here travels as it is."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a sender knows of the segment before, without its bytes."""

    header: bytes
    present: bytes
    """Of each part, whether the optimizer had state."""

    @classmethod
    def of(cls, segment_U8: Tensor) -> Baseline:
        """Of a segment whose bytes are final."""
        segment = segment_U8.numpy()
        header = SegmentLayout.header_in(segment.data)
        return cls(header, index_of(header).present(segment))


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """What travels in the place of a segment."""

    recipe: bytes
    payload: Sequence[Tensor]
    """uint8, without copies: views of the segment, then of gradients."""
    exact: bool = True
    """Whether it leads to the bytes of the segment."""

    @property
    def payload_nbytes(self) -> int:
        """Without the recipe."""
        return sum(view.numel() for view in self.payload)


def encode_delta(base: Baseline, segment_U8: Tensor, gradients: Gradients, *, audit: bool = False) -> EncodedDelta:
    """Tell a segment by the step that led to it.

    Args:
        base: of the boundary before, which the receiver has.
        segment_U8: all bytes of the file; they and the gradients must stay as they are until all is sent.
        gradients: of the step.
        audit: whether the segment travels besides.
    """
    now = Baseline.of(segment_U8)
    settings: dict[StepSettings, int] = {}
    codes = bytes(_codes(base, now, gradients, settings))
    plan = plan_delta(base.header, now.header, codes, gradients.dtype, whole=audit)
    literal = [segment_U8[start:stop] for start, stop in plan.literal]
    stepped = [gradients.area[start:stop] for start, stop in _gradient_runs(plan, gradients)]
    exact = audit or gradients.dtype is torch.float32
    document = {
        "settings": [asdict(each) for each in list(settings)[:_MAX_SETTINGS]],
        "dtype": dtype_code(gradients.dtype),
        "audit": audit,
        "digest": None if gradients.dtype is torch.float32 else _digest(stepped).hexdigest(),
    }
    recipe = _pack(json.dumps(document).encode(), codes, squeeze(now.header, base.header))
    return EncodedDelta(recipe, [*literal, *stepped], exact)


class DeltaDecoder:
    """Rebuilds one segment from the one before it, in place, while its payload arrives.

    Args:
        recipe: from `encode_delta`.
        base_U8: begins with the segment before.
        out_U8: memory for the segment and, behind it, for gradients: as much as the sender has for both.

    Raises:
        Corrupt: the recipe is not whole, or is for another segment before this one.
    """

    def __init__(self, recipe: bytes, base_U8: Tensor, out_U8: Tensor) -> None:
        base_header = SegmentLayout.header_in(base_U8.numpy().data)
        document, codes, squeezed = _unpack(recipe, out_U8.numel())
        self._settings, self.dtype, self._wanted, audit = _read(document)
        header = unsqueeze(squeezed, base_header, out_U8.numel())
        self.plan = plan_delta(base_header, header, codes, self.dtype, whole=audit)
        self._base, self._out = base_U8, out_U8
        self._received = self._num_stepped = 0
        self._digest = xxhash.xxh3_128()
        self.drift: Drift | None = Drift() if self.plan.whole else None
        """In an audit, how far the steps lead from the segment."""
        if max(codes, default=0) >= STEPPED + len(self._settings) or out_U8.numel() < self.plan.nbytes:
            raise wrong_delta()
        self.plan.layout.write_header(out_U8)
        out, base = out_U8.numpy(), base_U8.numpy()
        for source, destination, nbytes in self.plan.kept:
            out[destination : destination + nbytes] = base[source : source + nbytes]

    @property
    def exact(self) -> bool:
        """Whether what is rebuilt has to be the sender's segment."""
        return self.plan.whole or self.dtype is torch.float32

    @property
    def whole(self) -> bool:
        """Whether the segment is rebuilt."""
        return self._received == self.plan.payload_nbytes

    def expect_gradients(self) -> None:
        """Raise `Corrupt` unless the gradients are those that were sent, where nothing else would tell."""
        if self._wanted is not None and self._digest.hexdigest() != self._wanted:
            raise Corrupt("gradients are not those that were sent. The next generation comes whole.")

    @property
    def segment(self) -> Tensor:
        """The memory of the segment; uint8."""
        return self._out[: self.plan.layout.nbytes]

    def place(self, offset: int, nbytes: int) -> Tensor:
        """Where the next bytes of the payload go; uint8, shape `[nbytes]`.

        Raises:
            Corrupt: these are not the next ones, or do not go to one place.
        """
        if offset != self._received or nbytes <= 0:
            raise wrong_delta()
        start, stop = self.plan.place(offset, nbytes)
        return self._out[start:stop]

    def arrived(self, nbytes: int) -> None:
        """The next bytes are in their place: steps are taken whose gradients are there."""
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
        drift = None if self.drift is None else PartDrift(len(part.state))
        for first in range(0, part.numel, _BLOCK_NUMEL):
            last = min(first + _BLOCK_NUMEL, part.numel)
            state = [self._moved(*offsets, first, last) for offsets in part.state]
            replay_adam(AdamState(*state), [settings.step(gradient[first:last], number)], threads=1)
            if drift is not None:
                drift.add(state, [_floats(self._out, offset, first, last) for _, offset in part.state])
        if drift is not None and self.drift is not None:
            self.drift = self.drift.with_part(drift)

    def _count(self, part: SteppedPart) -> int:
        """Write the step's number. Raises `Corrupt` if there was none before it."""
        (source, destination), nbytes = part.step, part.step_dtype.itemsize
        before = self._base[source : source + nbytes].view(part.step_dtype)
        if not self.plan.whole:
            self._out[destination : destination + nbytes].view(part.step_dtype).copy_(before + 1)
        number = float(before) + 1
        if not (number >= 1 and number.is_integer()):
            raise wrong_delta()
        return int(number)

    def _moved(self, source: int, destination: int, first: int, last: int) -> Tensor:
        """State of the segment before, where the step is taken."""
        base = _floats(self._base, source, first, last)
        return base.clone() if self.plan.whole else _floats(self._out, destination, first, last).copy_(base)


def _floats(memory_U8: Tensor, offset: int, first: int, last: int) -> Tensor:
    """Elements of a float32 tensor at `offset`."""
    return memory_U8[offset + 4 * first : offset + 4 * last].view(torch.float32)


def _digest(views: Sequence[Tensor]) -> xxhash.xxh3_128:
    digest = xxhash.xxh3_128()
    for view in views:
        digest.update(view.numpy().data)
    return digest


def _codes(base: Baseline, now: Baseline, gradients: Gradients, settings: dict[StepSettings, int]) -> Iterator[int]:
    """How each part is told; `settings` gets those in use, numbered."""
    before, index = index_of(base.header), index_of(now.header)
    for prefix, present in zip(index.prefixes, now.present, strict=True):
        part = gradients.parts.get(prefix)
        if part is None or not same_part(before, index, prefix):
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
    """Of the sender's memory; gradients that follow each other go together."""
    start = stop = -1
    for part in plan.stepped:
        offset = gradients.parts[part.prefix].offset
        if offset != stop:
            if start >= 0:
                yield start, stop
            start = offset
        stop = offset + gradient_nbytes(part.numel, gradients.dtype)
    if start >= 0:
        yield start, stop


def _pack(document: bytes, codes: bytes, squeezed: bytes) -> bytes:
    parts = [zlib.compress(document), zlib.compress(codes), squeezed]
    body = _LENGTHS.pack(*map(len, parts)) + b"".join(parts)
    return body + xxhash.xxh3_128_digest(body)


def _unpack(recipe: bytes, most: int) -> tuple[bytes, bytes, bytes]:
    """Document, codes of parts, of which there are fewer than bytes in a segment of `most`, and header."""
    body, digest = recipe[:-_DIGEST_NBYTES], recipe[-_DIGEST_NBYTES:]
    if len(body) < _LENGTHS.size or xxhash.xxh3_128_digest(body) != digest:
        raise Corrupt("the recipe of a delta is not the one that was sent. The next generation comes whole.")
    sizes = _LENGTHS.unpack_from(body)
    document, codes, squeezed = (body[a:b] for a, b in pairwise(accumulate([_LENGTHS.size, *sizes])))
    return _inflated(document, _MAX_DOCUMENT_NBYTES), _inflated(codes, most), squeezed


def _inflated(data: bytes, most: int) -> bytes:
    """At most one byte more than `most` is ever made."""
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(data, most + 1)
    except zlib.error as error:
        raise wrong_delta() from error
    if len(found) > most or not stream.eof:
        raise wrong_delta()
    return found


def _read(document: bytes) -> tuple[list[StepSettings], torch.dtype, str | None, bool]:
    """Settings, type of gradients, their digest, and whether the segment travels besides. Raises `Corrupt`."""
    try:
        found = json.loads(document)
        settings = [StepSettings(**each) for each in found["settings"]]
        dtype, digest, audit = dtype_of(found["dtype"]), found["digest"], found["audit"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise wrong_delta() from error
    numbers = [value for each in settings for value in asdict(each).values()]
    known = dtype in {torch.float32, torch.bfloat16} and isinstance(digest, str | None) and isinstance(audit, bool)
    if not known or not all(isinstance(value, int | float) for value in numbers):
        raise wrong_delta()
    return settings, dtype, digest, audit
