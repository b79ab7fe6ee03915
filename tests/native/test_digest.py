"""Digests of ranges: the compiled part and its twin against the `xxhash` package, bit for bit."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TypeAlias

import numpy as np
import pytest
import xxhash

from lightning_moe_ckpt.native import Ranges
from lightning_moe_ckpt.native._host_memory import digest_compiled, digest_in_python, package_functions
from lightning_moe_ckpt.native._library import NativeError, cpu

Digest: TypeAlias = Callable[[Sequence[tuple[int, int]], memoryview, bytes], tuple[bytes, str]]


def compiled(pairs: Sequence[tuple[int, int]], view: memoryview, separator: bytes) -> tuple[bytes, str]:
    library, functions = cpu(), package_functions()
    if library is None or functions is None:
        pytest.skip("without the compiled part, or its functions in xxhash")
    texts, whole = digest_compiled(library, functions, _array(pairs), view, separator)
    return bytes(texts), whole


def in_python(pairs: Sequence[tuple[int, int]], view: memoryview, separator: bytes) -> tuple[bytes, str]:
    texts, whole = digest_in_python(_array(pairs), view, separator)
    return bytes(texts), whole


def _array(pairs: Sequence[tuple[int, int]]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.array(pairs, np.uint64).reshape(-1, 2)


@pytest.fixture(params=[compiled, in_python])
def digest(request: pytest.FixtureRequest) -> Digest:
    found: Digest = request.param
    return found


def _bytes(nbytes: int) -> memoryview:
    return memoryview(random.Random(nbytes).randbytes(nbytes))


def _expected(pairs: Sequence[tuple[int, int]], view: memoryview, separator: bytes) -> tuple[bytes, str]:
    texts = [xxhash.xxh3_128_hexdigest(bytes(view[start:stop])).encode() for start, stop in pairs]
    return separator.join(texts), xxhash.xxh3_128_hexdigest(bytes(view))


def test_every_length_up_to_a_page_has_the_digest_of_the_package(digest: Digest) -> None:
    """XXH3 has a way of its own for lengths up to 16, 128, 240, 1024 bytes and multiples."""
    view = _bytes(9000)
    pairs = [(nbytes % 700, nbytes % 700 + nbytes) for nbytes in range(4097)]
    assert digest(pairs, view, b'","') == _expected(pairs, view, b'","')


@pytest.mark.parametrize("nbytes", [(128 << 10) - 1, 128 << 10, (128 << 10) + 1, (1 << 20) + 7, (5 << 20) + 333])
def test_large_ranges_and_gaps_between_them(digest: Digest, nbytes: int) -> None:
    """A range beyond a chunk is read in pieces, and the whole buffer has bytes before, between and behind ranges."""
    view = _bytes(3 * nbytes + 200)
    pairs = [(64, 64 + nbytes), (100 + nbytes, 100 + 2 * nbytes), (150 + 2 * nbytes, 150 + 2 * nbytes)]
    assert digest(pairs, view, b"") == _expected(pairs, view, b"")


def test_ranges_in_any_order_and_on_top_of_each_other(digest: Digest) -> None:
    view = _bytes(1 << 20)
    drawn = random.Random(1)
    pairs = [(start, drawn.randint(start, 1 << 20)) for start in (drawn.randint(0, 1 << 20) for _ in range(40))]
    assert digest(pairs, view, b", ") == _expected(pairs, view, b", ")


@pytest.mark.parametrize("nbytes", [0, 1, 5000])
def test_a_buffer_without_ranges_has_a_digest(digest: Digest, nbytes: int) -> None:
    view = _bytes(nbytes)
    assert digest([], view, b",") == _expected([], view, b",")


def test_a_range_beyond_the_buffer_is_refused() -> None:
    """By the caller's half, and by the compiled half, which would read foreign memory."""
    for pair in ((0, 11), (8, 7), (20, 30)):
        with pytest.raises(ValueError, match="not within the buffer of 10 bytes"):
            Ranges([(0, 10), pair]).digest(_bytes(10), b"")
        with pytest.raises(NativeError, match="digest: range 1 is"):
            compiled([(0, 10), pair], _bytes(10), b"")


def test_the_number_of_calls_does_not_depend_on_the_number_of_ranges() -> None:
    """Each call would hold the interpreter lock for a moment, which training waits for."""
    if cpu() is None or package_functions() is None:
        pytest.skip("without the compiled part, or its functions in xxhash")
    view = _bytes(40_000)

    def calls(num: int) -> int:
        ranges, seen = Ranges((4 * index, 4 * index + 4) for index in range(num)), 0

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal seen
            seen += event in {"call", "c_call"}

        sys.setprofile(count)
        try:
            ranges.digest(view, b",")
        finally:
            sys.setprofile(None)
        return seen

    assert calls(10_000) == calls(10) > 0
