"""Write and read the journal record of a segment: a length, then one codec value, in a record of fixed capacity.

The capacity is fixed because a segment's header is written once per plan. A larger journal makes one
window useless, and the next plan reserves twice what was needed; one that fills two thirds makes the next plan reserve
three times as much, before there is too little.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.journal._codec import decode, encode, refusals

Journal = dict[str, Any]
UNFIT = "unfit"
"""Key of a start half that says why no run can go on from it."""

_PAGE = 4096

_LENGTH = struct.Struct("<Q")


class JournalOverflow(Exception):
    """A journal needs `nbytes`, more than its record has. The session catches this error and reports it."""

    def __init__(self, nbytes: int, capacity: int) -> None:
        super().__init__(
            f"the step journal takes {nbytes} bytes, its record holds {capacity}; the next plan reserves more"
        )
        self.nbytes = nbytes


class JournalCapacity:
    """Capacity of journal records: twice the largest journal seen."""

    def __init__(self) -> None:
        self.nbytes = _PAGE
        """Bytes of the record."""

    def needs(self, nbytes: int) -> None:
        """Note a journal of `nbytes`."""
        self.had(2 * nbytes)

    def had(self, nbytes: int) -> None:
        """Use at least the `nbytes` of an earlier process, since they were enough."""
        self.nbytes = max(self.nbytes, -(-nbytes // _PAGE) * _PAGE)


def encode_journal(journal: Journal, capacity: int, on_host: Mapping[int, Tensor] | None = None) -> bytes:
    """Encode a journal to bytes for the start of a record with `capacity` bytes. Raises `JournalOverflow` if the bytes
    do not fit. For `on_host`, and for `CodecError`, see `encode`.
    """
    payload = encode(journal, on_host)
    if (nbytes := _LENGTH.size + len(payload)) > capacity:
        raise JournalOverflow(nbytes, capacity)
    return _LENGTH.pack(len(payload)) + payload


def decode_journal(record_U8: Tensor) -> Journal:
    """Decode the journal in a record. Raises `Corrupt` if the length or the value is not what was written."""
    data = record_U8.numpy().tobytes()
    (length,) = _LENGTH.unpack_from(data)
    if length > len(data) - _LENGTH.size:
        raise Corrupt(f"journal: its length {length} exceeds its record of {len(data)} bytes. Use an older generation.")
    journal = decode(data[_LENGTH.size : _LENGTH.size + length])
    if not isinstance(journal, dict):
        raise Corrupt(f"journal: found a {type(journal).__name__}, wanted a dict. Use an older generation.")
    return journal


def differs(stored: object, found: object) -> bool:
    """Return whether a value differs in any bit from one that a journal has stored."""
    return stored is not found and (bool(refusals(found)) or encode(stored) != encode(found))
