"""Operators: slices of parameters that are captured and restored together.

An operator is not a module. A stacked expert tensor `[E, ...]` gives `E` operators, each a flat interval of that
tensor; a dense transformer block is one operator made of whole parameters. All coordinates are global, so that
another number of ranks can read a record later.

Source: MoEvement (2026), Sec. 3.1 (operators); we differ in slicing parameters instead of naming modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

OperatorKind = Literal["expert", "router", "dense"]
Holders = Literal["stage", "expert_data"]


class RecordKind(str, Enum):
    """Content of an operator's record."""

    FULL = "full"
    """Master weights and optimizer state, or the fact that there is no state yet."""
    COMPUTE = "compute"
    """The weights that forward and backward read, in the precision in which they read them."""
    DELTA = "delta"
    """What leads from the state of the boundary before to this one: the gradient as the optimizer consumed it, or the whole
    state of a parameter whose step cannot be repeated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSlice:
    """A flat interval `[start, stop)` of one local, contiguous parameter, with its place in the global tensor."""

    fqn: str
    """Name in `named_parameters()` of the live model; the first one for tied parameters."""
    start: int
    """First element in the flattened local parameter."""
    stop: int
    """One past the last element."""
    global_shape: tuple[int, ...]
    """Shape of the parameter over all expert-parallel ranks."""
    global_start: int
    """Index of the first element in the flattened global parameter."""

    @property
    def numel(self) -> int:
        """Elements in the slice."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """The unit that can be captured alone."""

    name: str
    """Unique and stable, e.g. `blocks.0.moe/expert.3`, `blocks.0.moe/router`, `blocks.0`."""
    kind: OperatorKind
    slices: tuple[ParamSlice, ...]
    layer: str | None = None
    """FQN of the MoE layer an expert or router belongs to."""
    expert_idx: int | None = None
    """Global expert index; `None` for routers and dense operators."""
    holders: Holders = "stage"
    """Which ranks hold the same bits: all of the pipeline stage (of the world, without stages), or those that share this
    rank's experts."""
    buffers: tuple[str, ...] = ()
    """Names of a router's buffers. Buffers are not sliced: every segment has all of them whole."""

    @property
    def numel(self) -> int:
        """Elements in all slices."""
        return sum(s.numel for s in self.slices)


def split(operator: Operator, max_nbytes: int, bytes_per_element: int | Callable[[ParamSlice], int]) -> list[Operator]:
    """Cut `operator` into pieces of at most `max_nbytes`, between rows of the last dimension if a row fits.

    Args:
        operator: the operator to cut.
        max_nbytes: limit of one piece's FULL record, without state of fixed size (a step count).
        bytes_per_element: bytes of a FULL record per element, for all slices or by slice.

    Returns:
        `[operator]` if it fits, else operators `name#0`, `name#1`, ... that cover it once, in order.

    Raises:
        ValueError: not even one element fits.
    """
    pieces: list[list[ParamSlice]] = [[]]
    room = max_nbytes
    for piece in operator.slices:
        width = bytes_per_element(piece) if callable(bytes_per_element) else bytes_per_element
        if width > max_nbytes:
            raise ValueError(
                f"`split(max_nbytes={max_nbytes})` cannot hold one element of `{piece.fqn}` ({width} bytes)."
            )
        start = piece.start
        while start < piece.stop or piece.numel == 0:
            take = _take(piece, start, room // width, max_nbytes // width)
            if take or piece.numel == 0:
                moved = piece.global_start + start - piece.start
                pieces[-1].append(replace(piece, start=start, stop=start + take, global_start=moved))
                start, room = start + take, room - take * width
            if start >= piece.stop:
                break
            pieces.append([])
            room = max_nbytes
    if len(pieces) == 1:
        return [operator]
    return [
        replace(operator, name=f"{operator.name}#{i}", slices=tuple(s), buffers=operator.buffers if i == 0 else ())
        for i, s in enumerate(pieces)
    ]


def _take(piece: ParamSlice, start: int, room: int, most: int) -> int:
    """Return the elements of the slice to take now: the rest if it fits, else whole rows, else what fits."""
    left = piece.stop - start
    if left <= room:
        return left
    row = piece.global_shape[-1] if piece.global_shape else 1
    # If a piece can hold a row at all, never cut inside one: start a new piece instead.
    return room // row * row if row <= most else room
