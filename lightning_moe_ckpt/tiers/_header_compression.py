"""Bytes that are nearly those of an earlier version, told by what differs from it.

Headers and markers of generations that follow each other hold the same names, sizes and offsets. What differs are
digests, a few numbers and, where other experts are taken, some rows. Line by line: an equal line takes a few bytes, one
of equal length is told by what is different in place, any other is compressed with the older one as its dictionary.
"""

from __future__ import annotations

import struct
import zlib
from itertools import zip_longest

import numpy as np

from lightning_moe_ckpt.errors import Corrupt

_SAME, _IN_PLACE, _ANEW = range(3)
_PART = struct.Struct("<BII")
"""How a line is told, its bytes, and the bytes that tell it."""
_DICTIONARY_NBYTES = 2**15
"""As far as zlib looks back."""


def compress(data: bytes, like: bytes) -> bytes:
    """Tell `data` to somebody who has `like`."""
    parts = []
    for line, older in zip_longest(data.split(b"\n"), like.split(b"\n")):
        if line is None:
            break
        how, told = _tell(line, older or b"")
        parts += [_PART.pack(how, len(line), len(told)), told]
    return b"".join(parts)


def decompress(told: bytes, like: bytes, most: int) -> bytes:
    """What `squeeze` was given, from what it returned and the same `like`.

    Args:
        told: from `squeeze`.
        like: what it was given.
        most: bytes that may come of it.

    Raises:
        Corrupt: it was told to somebody who had something else, and that is noticed; or more than `most` would come of it,
            which is found out before they are made.
    """
    older, lines = like.split(b"\n"), list[bytes]()
    position = 0
    while position < len(told):
        try:
            how, nbytes, told_nbytes = _PART.unpack_from(told, position)
        except struct.error as error:
            raise _refused() from error
        most -= nbytes + 1
        if most < -1:
            raise Corrupt("what was told by its difference to an earlier version is larger than any version may be.")
        position += _PART.size + told_nbytes
        body = told[position - told_nbytes : position]
        lines.append(_hear(how, body, older[len(lines)] if len(lines) < len(older) else b"", nbytes))
    return b"\n".join(lines)


def _tell(line: bytes, older: bytes) -> tuple[int, bytes]:
    if line == older:
        return _SAME, b""
    compress = zlib.compressobj(zdict=older[-_DICTIONARY_NBYTES:])
    anew = compress.compress(line) + compress.flush()
    if len(line) != len(older):
        return _ANEW, anew
    in_place = zlib.compress(_difference(line, older))
    return (_IN_PLACE, in_place) if len(in_place) < len(anew) else (_ANEW, anew)


def _hear(how: int, told: bytes, older: bytes, nbytes: int) -> bytes:
    if how == _SAME:
        line = older
    elif how == _IN_PLACE:
        difference = _inflated(told, nbytes)
        line = _difference(difference, older) if len(difference) == len(older) else b""
    elif how == _ANEW:
        line = _inflated(told, nbytes, dictionary=older[-_DICTIONARY_NBYTES:])
    else:
        raise _refused()
    if len(line) != nbytes:
        raise _refused()
    return line


def _inflated(told: bytes, nbytes: int, *, dictionary: bytes = b"") -> bytes:
    """At most one byte more than there should be, whatever was told."""
    try:
        return zlib.decompressobj(zdict=dictionary).decompress(told, nbytes + 1)
    except zlib.error as error:
        raise _refused() from error


def _difference(one: bytes, other: bytes) -> bytes:
    return np.bitwise_xor(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)).tobytes()


def _refused() -> Corrupt:
    return Corrupt("what was told by its difference to an earlier version belongs to another one.")
