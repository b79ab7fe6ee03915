"""Which bytes of a segment are told how, by a delta: a pure function of two headers and one code per part.

Sender and receiver make the same plan, so a recipe names no offsets. Plans follow each other unchanged while the same
experts are taken, and are remembered.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage import SegmentLayout, Span

GRADIENT_ALIGN = 64
"""Bytes on which every gradient starts, in memory and on the wire."""

LITERAL, UNCHANGED, STEPPED = range(3)
"""How a part is told: as it is, not at all, or by its gradient; above `STEPPED` with other settings."""

Run = tuple[int, int]
"""First byte, and the one behind the last."""

_STEP, _PRESENT = "step", "present"
_REPLAYED = ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_KNOWN = (_PRESENT, "param", _STEP, "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_REMEMBERED = 16


def gradient_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes that a gradient takes, up to where the next one may start."""
    return aligned_gradient(numel * dtype.itemsize)


def aligned_gradient(nbytes: int) -> int:
    """Rounded up to where a gradient may start."""
    return nbytes + -nbytes % GRADIENT_ALIGN


class SegmentIndex:
    """The parts of a segment, by header. Use `index_of`."""

    def __init__(self, header: bytes) -> None:
        self.layout = SegmentLayout.of_header(header)
        self.prefixes = [name.removesuffix("/param") for name in self.layout.spans if name.endswith("/param")]
        """Of the names of each part's tensors, in the order of the file."""
        self.position = {prefix: index for index, prefix in enumerate(self.prefixes)}
        present = [self.layout.spans.get(f"{prefix}/{_PRESENT}") for prefix in self.prefixes]
        self._has_flag = np.array([span is not None for span in present], dtype=np.bool_)
        self._flags = np.array([span.offset if span is not None else 0 for span in present], dtype=np.int64)

    def present(self, segment: NDArray[np.uint8]) -> bytes:
        """Of each part, whether the optimizer had state; 0 where the segment does not say."""
        return np.where(self._has_flag, segment[self._flags], 0).astype(np.uint8).tobytes()

    def spans(self, prefix: str) -> dict[str, Span]:
        """The tensors of a part that a delta knows what to do with, by the rest of their names."""
        found = {key: self.layout.spans.get(f"{prefix}/{key}") for key in _KNOWN}
        return {key: span for key, span in found.items() if span is not None}

    def can_step(self, prefix: str) -> bool:
        """Whether the part has all that a step of Adam reads, in the precision that is replayed."""
        spans = self.spans(prefix)
        needed = [spans.get(key) for key in _KNOWN[:-1]]
        state = [spans[key].dtype for key in _REPLAYED if key in spans]
        return None not in needed and all(dtype is torch.float32 for dtype in state)


@lru_cache(_REMEMBERED)
def index_of(header: bytes) -> SegmentIndex:
    """The parts of a segment with this header. Raises `Corrupt`."""
    return SegmentIndex(header)


def same_part(base: SegmentIndex, index: SegmentIndex, prefix: str) -> bool:
    """Whether both segments have a part, of one shape."""
    return prefix in base.position and _shapes(base.spans(prefix)) == _shapes(index.spans(prefix))


@dataclass(frozen=True, slots=True)
class SteppedPart:
    """A part that is told by its gradient."""

    prefix: str
    settings: int
    """Which, of the recipe."""
    numel: int
    state: Sequence[tuple[int, int]]
    """Offsets of parameter and moments in the segment before, and in this one."""
    step: tuple[int, int]
    """Of the step count, likewise."""
    step_dtype: torch.dtype
    gradient: int
    """Offset behind the segment."""
    end: int
    """Byte of the payload with which its gradient is whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaPlan:
    """What becomes of every byte."""

    layout: SegmentLayout
    literal: Sequence[Run]
    """Of the segment, as they are; in the order of the payload."""
    literal_names: frozenset[str]
    """Of the tensors in there."""
    kept: Sequence[tuple[int, int, int]]
    """Offset in the segment before, offset in this one, bytes."""
    stepped: Sequence[SteppedPart]
    whole: bool
    """Whether the segment comes as it is, and steps are taken only to see where they lead."""
    literal_nbytes: int
    payload_nbytes: int
    places: Sequence[tuple[int, int, int]]
    """Begin in the payload, offset in memory, bytes."""

    @property
    def nbytes(self) -> int:
        """Memory of the segment and, behind it, the gradients that travel."""
        return self.gradients_at + self.payload_nbytes - self.literal_nbytes

    @property
    def gradients_at(self) -> int:
        """Offset of the memory behind the segment."""
        return aligned_gradient(self.layout.nbytes)

    def place(self, offset: int, nbytes: int) -> Run:
        """Where bytes of the payload go. Raises `Corrupt` unless they go to one place."""
        index = bisect_right(self.places, (offset, self.nbytes, 0)) - 1
        if index >= 0:
            begin, place, size = self.places[index]
            if offset + nbytes <= begin + size:
                return place + offset - begin, place + offset - begin + nbytes
        raise wrong_delta()


@lru_cache(_REMEMBERED)
def plan_delta(base_header: bytes, header: bytes, codes: bytes, dtype: torch.dtype, *, whole: bool) -> DeltaPlan:
    """What becomes of every byte of a segment.

    Args:
        base_header: of the segment before.
        header: of the segment.
        codes: how each part is told, in the order of the file.
        dtype: of gradients.
        whole: whether the segment comes as it is, besides.

    Raises:
        Corrupt: this cannot be done with these two.
    """
    base, index = index_of(base_header), index_of(header)
    if len(codes) != len(index.prefixes):
        raise wrong_delta()
    told = {prefix: code for prefix, code in zip(index.prefixes, codes, strict=True) if code != LITERAL}
    for prefix, code in told.items():
        if not same_part(base, index, prefix) or (code >= STEPPED and not index.can_step(prefix)):
            raise wrong_delta()
    known = set() if whole else {f"{prefix}/{key}" for prefix in told for key in index.spans(prefix)}
    names = frozenset(index.layout.spans) - known
    literal = [(0, index.layout.nbytes)] if whole else list(_runs(index.layout, names))
    literal_nbytes = sum(stop - start for start, stop in literal)
    stepped = list(_stepped(base, index, told, dtype, literal_nbytes))
    payload_nbytes = stepped[-1].end if stepped else literal_nbytes
    return DeltaPlan(
        layout=index.layout,
        literal=literal,
        literal_names=names,
        kept=[] if whole else list(_kept(base, index, told)),
        stepped=stepped,
        whole=whole,
        literal_nbytes=literal_nbytes,
        payload_nbytes=payload_nbytes,
        places=list(_places(literal, aligned_gradient(index.layout.nbytes), payload_nbytes)),
    )


def wrong_delta() -> Corrupt:
    """A delta that nothing can be done with."""
    return Corrupt("a delta does not fit the segment that it was to be applied to. The next generation comes whole.")


def _shapes(spans: dict[str, Span]) -> dict[str, tuple[int, torch.dtype]]:
    return {key: (span.nbytes, span.dtype) for key, span in spans.items()}


def _runs(layout: SegmentLayout, names: frozenset[str]) -> Iterator[Run]:
    """Tensors that follow each other go together, with the filling between them."""
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


def _kept(base: SegmentIndex, index: SegmentIndex, told: dict[str, int]) -> Iterator[tuple[int, int, int]]:
    for prefix, code in told.items():
        before, now = base.spans(prefix), index.spans(prefix)
        for key in now if code == UNCHANGED else (_PRESENT,):
            yield before[key].offset, now[key].offset, now[key].nbytes


def _stepped(
    base: SegmentIndex, index: SegmentIndex, told: dict[str, int], dtype: torch.dtype, begin: int
) -> Iterator[SteppedPart]:
    gradient = 0
    for prefix, code in told.items():
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
