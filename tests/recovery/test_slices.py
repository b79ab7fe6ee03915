"""Slices of a parameter are loaded all at once, in whatever order they are stored, bit for bit as one by one."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_moe_ckpt.recovery import _replay
from lightning_moe_ckpt.recovery._replay import _copies

TYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float64),
    (torch.float64, torch.float64),
    (torch.float8_e4m3fn, torch.float8_e4m3fn),
    (torch.int16, torch.int16),
    (torch.complex64, torch.complex64),
    (torch.bool, torch.bool),
]


@pytest.mark.parametrize("large", [1, 2**15])
@settings(deadline=None, max_examples=200)
@given(st.data(), st.sampled_from(TYPES))
def test_slices_are_loaded_as_one_by_one(
    large: int, data: st.DataObject, types: tuple[torch.dtype, torch.dtype]
) -> None:
    """Equal ones in any order, a part of them, others of another size between, and gaps in both places; also those that go by address."""
    stored, live = types
    size, gap = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 3))
    sizes = [size + data.draw(st.sampled_from([0, 0, 0, 1])) for _ in range(data.draw(st.integers(1, 9)))]
    starts = np.cumsum([0, *(each + gap for each in sizes)])
    order = data.draw(st.permutations(range(len(sizes))))
    taken = order[: data.draw(st.integers(1, len(order)))]
    at, nbytes = [], 64 * data.draw(st.integers(0, 2))
    for index in taken:
        at.append(nbytes)
        nbytes += -(-sizes[index] * stored.itemsize // 64) * 64 + 64 * data.draw(st.sampled_from([0, 0, 1]))
    source = torch.randint(0, 2 if stored is torch.bool else 100, (nbytes,), dtype=torch.uint8)
    found, expected = (torch.zeros(int(starts[-1]) + 3, dtype=live) for _ in range(2))
    for place, index in zip(at, taken, strict=True):
        value = source[place : place + sizes[index] * stored.itemsize].view(stored)
        expected[int(starts[index]) : int(starts[index]) + sizes[index]] = value.to(live)
    with patch.object(_replay, "_LARGE_ROW_NBYTES", large):
        load(found, source, np.array(at), stored, (starts[taken], np.array(sizes)[taken]))
    assert torch.equal(bits(found), bits(expected))


def load(
    live: Tensor, source: Tensor, at: np.ndarray, dtype: torch.dtype, slices: tuple[np.ndarray, np.ndarray]
) -> None:
    before = live._version
    for value, into in _copies(source, at, dtype, live, slices):
        into.copy_(value)
    assert live._version > before


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("order", ["as they lie", "drawn"])
def test_thousands_of_slices_are_loaded_in_a_few_calls(order: str) -> None:
    """Popular experts come last in a window, in an order that has nothing to do with their places."""
    number, size = 4096, 16
    to = np.arange(number) if order == "as they lie" else np.random.default_rng(0).permutation(number)
    value = torch.randn(number, size)
    live = torch.zeros(number * size)
    copies = list(
        _copies(
            value.view(-1).view(torch.uint8),
            np.arange(number) * 64,
            torch.float32,
            live,
            (to * size, np.full(number, size)),
        )
    )
    assert len(copies) == (1 if order == "as they lie" else 0)
    for rows, into in copies:
        into.copy_(rows)
    assert torch.equal(live.view(number, size)[torch.from_numpy(to)], value)
