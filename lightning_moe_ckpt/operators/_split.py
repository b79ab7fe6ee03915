"""Cut an operator larger than a budget into pieces that are captured at different steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_moe_ckpt.operators._types import Operator, ParamSlice


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
                pieces[-1].append(_cut(piece, start, start + take))
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


def _cut(piece: ParamSlice, start: int, stop: int) -> ParamSlice:
    moved = piece.global_start + start - piece.start
    return replace(piece, start=start, stop=stop, global_start=moved)
