"""Plan how a delta encodes a segment's bytes: a pure function of two headers and one code per part.

Sender and receiver make the same plan, so a recipe names no offsets. Plans are cached: they are equal while the same
experts are taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.native import AdamStep, CompressedGradient
from lightning_moe_ckpt.storage import SegmentLayout, Span

GRADIENT_ALIGN = 64
"""Bytes on which every gradient starts, in memory and on the wire."""

LITERAL, UNCHANGED, STEPPED = range(3)
"""Codes of a part: sent whole, not sent, or sent as its gradient. Codes above `STEPPED` select further settings."""

Run = tuple[int, int]
"""First byte, and the byte after the last."""

_STEP, _PRESENT = "step", "present"
_REPLAYED = ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_KNOWN = (_PRESENT, "param", _STEP, "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_REMEMBERED = 16
_ZEROS = 4096
"""Zeros that are not sent come in blocks of so many bytes."""


def gradient_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Return a gradient's bytes, with padding to the next gradient."""
    return aligned_gradient(numel * dtype.itemsize)


def aligned_gradient(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of `GRADIENT_ALIGN`."""
    return nbytes + -nbytes % GRADIENT_ALIGN


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings of Adam or AdamW in a step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    kernel: str = ""
    """Kernel that repeats the step, see `AdamStep`."""

    def described(self) -> dict[str, Any]:
        """Return the settings as JSON values, without an empty `kernel`."""
        return {key: value for key, value in asdict(self).items() if value != ""}

    def step(self, gradient: Tensor | CompressedGradient, number: int) -> AdamStep:
        """Return the arguments of step `number` with `gradient`."""
        return AdamStep(gradient=gradient, step=number, **asdict(self))


@dataclass(frozen=True, slots=True)
class PartGradient:
    """Gradient of one shard in a segment, with the settings of the step that consumed it."""

    offset: int
    """Offset in `Gradients.area`; a multiple of `GRADIENT_ALIGN`."""
    settings: StepSettings | None
    """Settings of the step; `None` if the shard had no gradient, and so no step."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients consumed by an optimizer step, by part of the segment after the step."""

    area: Tensor
    """Memory for the gradients, uint8."""
    dtype: torch.dtype
    """float32, or bfloat16 where rounding is allowed."""
    parts: Mapping[str, PartGradient]
    """Parts by the prefix of their tensors' names; a part missing here is sent whole."""


class SegmentIndex:
    """Index of a segment's parts, from the segment's header; `index_of` makes and caches it."""

    def __init__(self, header: bytes) -> None:
        self.layout = SegmentLayout.of_header(header)
        self.prefixes = [name.removesuffix("/param") for name in self.layout.spans if name.endswith("/param")]
        """Prefix of each part's tensor names, in file order."""
        self.position = {prefix: index for index, prefix in enumerate(self.prefixes)}
        present = [self.layout.spans.get(f"{prefix}/{_PRESENT}") for prefix in self.prefixes]
        self._has_flag = np.array([span is not None for span in present], dtype=np.bool_)
        self._flags = np.array([span.offset if span is not None else 0 for span in present], dtype=np.int64)

    @property
    def last(self) -> int:
        """First byte of the last tensor."""
        return next((span.offset for span in reversed(self.layout.spans.values())), self.layout.nbytes)

    def zeros(self, segment_U8: Tensor) -> int:
        """Return the zero bytes at the end of the last tensor, in whole blocks: most of a journal's room."""
        room_U8 = segment_U8[self.last : self.layout.nbytes]
        used = room_U8[room_U8.numel() % _ZEROS :].view(-1, _ZEROS).any(1).flip(0).tolist()
        return _ZEROS * (used.index(True) if True in used else len(used))

    def present(self, segment: NDArray[np.uint8]) -> bytes:
        """Return one byte per part: nonzero if the optimizer had state; 0 if the segment does not say."""
        return np.where(self._has_flag, segment[self._flags], 0).astype(np.uint8).tobytes()

    def spans(self, prefix: str) -> dict[str, Span]:
        """Return the part's tensors that a delta can encode, by the name after the prefix."""
        found = {key: self.layout.spans.get(f"{prefix}/{key}") for key in _KNOWN}
        return {key: span for key, span in found.items() if span is not None}

    def can_step(self, prefix: str) -> bool:
        """Return whether the part has all tensors read by a step of Adam, in the supported dtype."""
        spans = self.spans(prefix)
        needed = [spans.get(key) for key in _KNOWN[:-1]]
        state = [spans[key].dtype for key in _REPLAYED if key in spans]
        return None not in needed and all(dtype is torch.float32 for dtype in state)


@lru_cache(_REMEMBERED)
def index_of(header: bytes) -> SegmentIndex:
    """Return a segment's index with this header. Raises `Corrupt`."""
    return SegmentIndex(header)


def same_part(base: SegmentIndex, index: SegmentIndex, prefix: str) -> bool:
    """Return whether both segments have the part, in the same shape."""
    return prefix in base.position and _shapes(base.spans(prefix)) == _shapes(index.spans(prefix))


@dataclass(frozen=True, slots=True)
class SteppedPart:
    """A part sent as its gradient."""

    prefix: str
    settings: int
    """Index of the step's settings in the recipe."""
    numel: int
    state: Sequence[tuple[int, int]]
    """Offsets of parameter and moments, in the previous segment and in this one."""
    step: tuple[int, int]
    """Offsets of the step count, in the previous segment and in this one."""
    step_dtype: torch.dtype
    gradient: int
    """Offset of the gradient in the gradients behind the segment."""
    end: int
    """Bytes of the payload after which the gradient is complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaPlan:
    """Origin of every byte in a segment."""

    layout: SegmentLayout
    literal: Sequence[Run]
    """Runs of the segment sent whole, in payload order."""
    literal_names: frozenset[str]
    """Names of the tensors in `literal` and in the mirrored run."""
    kept: Sequence[tuple[int, int, int]]
    """Unchanged runs: offset in the previous segment, offset in this one, bytes."""
    stepped: Sequence[SteppedPart]
    whole: bool
    """Whether the whole segment is sent, and steps are taken only to measure their error."""
    literal_nbytes: int
    payload_nbytes: int
    places: Sequence[tuple[int, int, int]]
    """Runs of the payload: first byte, offset in memory, bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory for the segment and the gradients behind it."""
        return self.gradients_at + self.payload_nbytes - self.literal_nbytes

    @property
    def gradients_at(self) -> int:
        """Offset of the gradients behind the segment."""
        return aligned_gradient(self.layout.nbytes)

    def place(self, offset: int, nbytes: int) -> Run:
        """Return the place of the payload's bytes in memory. Raises `Corrupt` unless they go to one run."""
        if (index := bisect_right(self.places, (offset, self.nbytes, 0)) - 1) >= 0:
            begin, place, size = self.places[index]
            if offset + nbytes <= begin + size:
                return place + offset - begin, place + offset - begin + nbytes
        raise wrong_delta()


@lru_cache(_REMEMBERED)
def plan_delta(
    base_header: bytes,
    header: bytes,
    codes: bytes,
    dtype: torch.dtype,
    *,
    whole: bool,
    mirrored: Run | None = None,
    zeros: int = 0,
) -> DeltaPlan:
    """Plan the origin of every byte of a segment, from its header and the previous segment's, and the code of each
    part's encoding, in the order of the file. Raises `Corrupt` if the codes do not fit the two headers.

    With `whole` the whole segment is sent too. The receiver has the run `mirrored`; its parts have the code `LITERAL`.
    Neither these are sent, nor the last `zeros` bytes, which are zero.
    """
    base, index = index_of(base_header), index_of(header)
    if len(codes) != len(index.prefixes) or not 0 <= zeros <= index.layout.nbytes - index.last:
        raise wrong_delta()
    encoded = {prefix: code for prefix, code in zip(index.prefixes, codes, strict=True) if code != LITERAL}
    for prefix, code in encoded.items():
        if not same_part(base, index, prefix) or (code >= STEPPED and not index.can_step(prefix)):
            raise wrong_delta()
    known = set() if whole else {f"{prefix}/{key}" for prefix in encoded for key in index.spans(prefix)}
    names = frozenset(index.layout.spans) - known
    literal = [(0, index.layout.nbytes)] if whole else list(_runs(index.layout, names))
    literal = list(_without(literal, mirrored or (0, 0)))
    literal = list(_without(literal, (index.layout.nbytes - zeros, index.layout.nbytes)))
    literal_nbytes = sum(stop - start for start, stop in literal)
    stepped = list(_stepped(base, index, encoded, dtype, literal_nbytes))
    payload_nbytes = stepped[-1].end if stepped else literal_nbytes
    return DeltaPlan(
        layout=index.layout,
        literal=literal,
        literal_names=names,
        kept=[] if whole else list(_kept(base, index, encoded)),
        stepped=stepped,
        whole=whole,
        literal_nbytes=literal_nbytes,
        payload_nbytes=payload_nbytes,
        places=list(_places(literal, aligned_gradient(index.layout.nbytes), payload_nbytes)),
    )


def wrong_delta() -> Corrupt:
    """Return the error for a delta that cannot be decoded."""
    return Corrupt("a delta does not fit the segment that it was to be applied to. The next generation comes whole.")


def _shapes(spans: dict[str, Span]) -> dict[str, tuple[int, torch.dtype]]:
    return {key: (span.nbytes, span.dtype) for key, span in spans.items()}


def _runs(layout: SegmentLayout, names: frozenset[str]) -> Iterator[Run]:
    """Yield runs of tensors; adjacent tensors share one run, with the padding between them."""
    start = stop = -1
    for name, span in layout.spans.items():
        if name in names and span.nbytes:
            start = span.offset if start < 0 else start
            stop = span.offset + span.nbytes
        elif name not in names and start >= 0:
            yield start, stop
            start = -1
    if start >= 0:
        yield start, stop


def _without(runs: Sequence[Run], hole: Run) -> Iterator[Run]:
    for start, stop in runs:
        for left, right in ((start, min(stop, hole[0])), (max(start, hole[1]), stop)):
            if left < right:
                yield left, right


def _kept(base: SegmentIndex, index: SegmentIndex, encoded: dict[str, int]) -> Iterator[tuple[int, int, int]]:
    for prefix, code in encoded.items():
        before, now = base.spans(prefix), index.spans(prefix)
        for key in now if code == UNCHANGED else (_PRESENT,):
            yield before[key].offset, now[key].offset, now[key].nbytes


def _stepped(
    base: SegmentIndex, index: SegmentIndex, encoded: dict[str, int], dtype: torch.dtype, begin: int
) -> Iterator[SteppedPart]:
    gradient = 0
    for prefix, code in encoded.items():
        if code < STEPPED:
            continue
        before, now = base.spans(prefix), index.spans(prefix)
        numel = now["param"].nbytes // 4
        size = gradient_nbytes(numel, dtype)
        yield SteppedPart(
            prefix=prefix,
            settings=code - STEPPED,
            numel=numel,
            state=[(before[key].offset, now[key].offset) for key in _REPLAYED if key in now],
            step=(before[_STEP].offset, now[_STEP].offset),
            step_dtype=now[_STEP].dtype,
            gradient=gradient,
            end=begin + gradient + size,
        )
        gradient += size


def _places(literal: Sequence[Run], gradients_at: int, payload_nbytes: int) -> Iterator[tuple[int, int, int]]:
    begin = 0
    for start, stop in literal:
        yield begin, start, stop - start
        begin += stop - start
    if begin < payload_nbytes:
        yield begin, gradients_at, payload_nbytes - begin
