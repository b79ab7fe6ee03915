"""Rows of text are the same from the compiled part and from Python."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_moe_ckpt.native import spell_rows
from lightning_moe_ckpt.native._host_memory import spell_compiled, spell_in_python
from lightning_moe_ckpt.native._library import NativeError, cpu

TEXTS = ["", "a", '\\"b\\"', "x" * 5000]


@pytest.mark.parametrize("count", [0, 1, 7, 3000])
def test_rows_are_alike(count: int) -> None:
    """Numbers of any size, and values that are left out."""
    library, rng = cpu(), np.random.default_rng(count)
    if library is None:
        pytest.skip("there is no compiled part")
    numbers = rng.integers(-(2**62), 2**62, count) >> rng.integers(0, 63, count)
    columns = [(None, numbers), (TEXTS, rng.integers(-2, len(TEXTS), count)), (None, np.arange(2 * count)[::2])]
    assert spell_compiled(library, columns) == spell_in_python(columns)
    assert spell_rows([(["zero", "one"], np.array([1, -1, 0])), "!"], 3) == b"one!,!,zero!"
    assert spell_rows([np.array([2**63 - 1, -1, 0])], 3) == b"9223372036854775807,,0"


def test_parts_without_a_value_for_each_row_are_refused() -> None:
    """Nothing is read beyond an array's end, whether of numbers, of indices or of texts."""
    for part in (np.arange(2), (TEXTS, np.zeros(4, np.int64))):
        with pytest.raises((AssertionError, ValueError)):
            spell_rows([part], 3)
    for texts, index in ((["a"], 1), ([], 0)):
        with pytest.raises((IndexError, NativeError)):
            spell_rows([(texts, np.array([index]))], 1)
    with pytest.raises(UnicodeEncodeError):
        spell_rows(["ü"], 1)
