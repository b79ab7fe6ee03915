"""Digest many ranges of a buffer, and all of it: one pass over memory, one call without the interpreter lock.

In Python a segment of 80,000 records takes as many calls, between which the lock goes to and fro. The compiled part
makes these calls instead. It calls XXH3 in the `xxhash` package, by the addresses of that package's functions, so there
is one implementation. Without the compiled part, or if the package hides its functions, the twin in Python does the
same.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.native._library import Library, cpu
from lightning_moe_ckpt.native._prototypes import Xxh3

log = rank_logger(__name__)

_HEX = 32
_SAMPLE = bytes(range(256)) * 4
"""Bytes that reach each of XXH3's code paths for lengths of input."""


class Ranges:
    """Ranges of a buffer, in any order; made once for buffers of one layout.

    Args:
        pairs: first byte of each range, and the byte behind its last.
    """

    def __init__(self, pairs: Iterable[tuple[int, int]]) -> None:
        self._pairs = np.array([*pairs], np.uint64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._pairs)

    def digest(self, view: memoryview, separator: bytes) -> tuple[bytes | memoryview, str]:
        """Return the digests of all ranges as text, joined by `separator`, and the whole buffer's digest.

        Args:
            view: C-contiguous bytes; the caller must not write to them meanwhile.
            separator: without a zero byte.

        Raises:
            ValueError: a range is not within the buffer.
        """
        if not ((self._pairs[:, 0] <= self._pairs[:, 1]) & (self._pairs[:, 1] <= view.nbytes)).all():
            raise ValueError(f"`Ranges.digest`: a range is not within the buffer of {view.nbytes} bytes.")
        library, functions = cpu(), package_functions()
        if library is None or functions is None:
            return digest_in_python(self._pairs, view, separator)
        return digest_compiled(library, functions, self._pairs, view, separator)


Pairs = npt.NDArray[np.uint64]


def digest_compiled(
    library: Library, functions: Xxh3, pairs: Pairs, view: memoryview, separator: bytes
) -> tuple[bytes | memoryview, str]:
    """Compute `Ranges.digest` in one call of the compiled part, which raises if a range is not in the buffer."""
    # Not zeroed first: that would hold the lock for as long as the pages take.
    texts = np.empty(max(len(pairs) * (_HEX + len(separator)) - len(separator), 0), np.uint8)
    whole = ctypes.create_string_buffer(_HEX)
    bytes_at = np.frombuffer(view, np.uint8).ctypes.data if view.nbytes else None
    library.moe_digest_ranges(
        functions, bytes_at, view.nbytes, pairs.ctypes.data, len(pairs), separator, texts.ctypes.data, whole
    )
    return memoryview(texts), whole.raw.decode("ascii")  # type: ignore[arg-type]  # arrays are buffers


def digest_in_python(pairs: Pairs, view: memoryview, separator: bytes) -> tuple[bytes | memoryview, str]:
    """Compute `Ranges.digest`, one range after another."""
    texts = [xxhash.xxh3_128_hexdigest(view[start:stop]).encode("ascii") for start, stop in pairs.tolist()]
    return separator.join(texts), str(xxhash.xxh3_128_hexdigest(view))


@functools.cache
def package_functions() -> Xxh3 | None:
    """Return the addresses of the package's functions; `None` if they are not exported, or differ."""
    try:
        library = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
        # Functions that pick the processor's instructions are only in newer packages, and on x86 only.
        picking = "_dispatch" if hasattr(library, "XXH3_128bits_update_dispatch") else ""
        names = [each.format(picking) for each in _NAMES]
        functions = Xxh3(*(ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in names))
    except (ImportError, OSError, AttributeError) as error:
        log.debug("xxhash is called from Python, range by range: %s", error)
        return None
    part = cpu()
    pairs = np.array([(0, nbytes) for nbytes in (0, 1, 16, 128, 240, len(_SAMPLE))], np.uint64)
    sample = pairs, memoryview(_SAMPLE), b","
    if part is not None and digest_compiled(part, functions, *sample) != digest_in_python(*sample):
        log.warning("xxhash is called from Python, range by range: called directly it gives other digests")
        return None
    return functions


_NAMES = (
    "XXH3_128bits{}", "XXH3_createState", "XXH3_freeState", "XXH3_128bits_reset", "XXH3_128bits_update{}",
    "XXH3_128bits_digest",
)  # fmt: skip
