"""Check a copy engine: small copies of every kind, in both directions, compared bytewise with torch on the CPU.

The check runs on any engine and device, so that it can be tested itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native._engine import CopyEngine

Memory: TypeAlias = Callable[[int], Tensor]
"""Allocates so many bytes as a uint8 tensor."""

PATIENCE = timedelta(seconds=20)
"""Limit for copies that take milliseconds; a longer wait means that the device hangs."""
_UNTOUCHED = 0xA5


class CheckFailed(CheckpointError, RuntimeError):
    """A function gave other bytes than its twin. The device check catches it and reports it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """Rows of elements with a gap after each, on both sides."""

    src: torch.dtype = torch.uint8
    dst: torch.dtype = torch.uint8
    rows: int = 1
    count: int
    gap: int = 3

    @property
    def numel(self) -> int:
        """Elements with the gaps."""
        return self.rows * (self.count + self.gap)


_FORMS = (
    *(_Form(count=count) for count in (1, 7, 333)),
    _Form(src=torch.float32, dst=torch.float32, count=257),
    _Form(src=torch.float32, dst=torch.float32, rows=9, count=14),
    *(_Form(src=torch.float32, dst=half, rows=3, count=301) for half in (torch.bfloat16, torch.float16)),
    *(_Form(src=half, dst=torch.float32, rows=3, count=301) for half in (torch.bfloat16, torch.float16)),
    *(_Form(count=count) for count in (100_003, 70_000, 131_072)),  # not packed: several copies of one batch
)
CHECKED_NBYTES = sum(4 * form.numel + 4 for form in _FORMS)


def check_copies(engine: CopyEngine, on_device: Memory, host: Memory) -> None:
    """Check that small, strided, converted and large slices arrive as at the fence, and no other byte changes.

    Args:
        engine: the engine to check.
        on_device: allocates memory on the engine's device.
        host: allocates memory on the other side.

    Raises:
        CheckFailed: some bytes differ from torch's.
        TimeoutError: the copies did not end.
    """
    _check_direction(engine, "to the host", on_device, host)
    _check_direction(engine, "to the device", host, on_device)


def _check_direction(engine: CopyEngine, where: str, source: Memory, target: Memory) -> None:
    source_U8, target_U8, given_U8 = (
        source(CHECKED_NBYTES),
        target(CHECKED_NBYTES),
        torch.zeros(CHECKED_NBYTES, dtype=torch.uint8),
    )
    expected_U8 = torch.full_like(given_U8, _UNTOUCHED)
    for index, (given, expected) in enumerate(zip(_views(given_U8, "src"), _views(expected_U8, "dst"), strict=True)):
        expected.copy_(given.copy_(_values(index, given.numel(), given.dtype).view_as(given)))
    source_U8.copy_(given_U8)
    target_U8.fill_(_UNTOUCHED)
    count, counted = torch.full((1,), 7.0), torch.zeros(1)  # of steps, which optimizers keep on the host
    pairs = zip(_views(source_U8, "src"), _views(target_U8, "dst"), strict=True)
    ticket = engine.submit(engine.prepare([*pairs, (count, counted)]))
    engine.fence(ticket)
    source_U8.zero_()
    count.zero_()
    ticket.wait(PATIENCE)
    wrong = (target_U8.cpu() != expected_U8).nonzero()
    if wrong.numel():
        raise CheckFailed(
            f"{wrong.numel()} of {CHECKED_NBYTES} bytes copied {where} differ, the first in {_form_at(int(wrong[0]))}"
        )
    if float(counted) != 7:
        raise CheckFailed(f"a number on the host arrived as {float(counted)}; it was 7 until after the fence")


def _views(memory_U8: Tensor, side: Literal["src", "dst"]) -> Iterator[Tensor]:
    for start, form in _starts(side):
        dtype: torch.dtype = getattr(form, side)
        flat = memory_U8[start : start + form.numel * dtype.itemsize].view(dtype)
        yield flat.view(form.rows, -1)[:, : form.count]


def _starts(side: Literal["src", "dst"]) -> Iterator[tuple[int, _Form]]:
    """Yield start offsets that are aligned to elements only."""
    at = 0
    for form in _FORMS:
        itemsize = getattr(form, side).itemsize
        at += -at % itemsize
        yield at, form
        at += form.numel * itemsize


def _form_at(byte: int) -> str:
    return str([form for start, form in _starts("dst") if start <= byte][-1])


def _values(seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return values of every magnitude, without NaN: its bits after a conversion depend on the device."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.uint8:
        return torch.randint(0, 256, (numel,), generator=generator, dtype=dtype)
    return (torch.randn(numel, generator=generator) * torch.logspace(-30, 38, numel)).to(dtype)
