"""Every way in which a small document can be damaged, tried."""

from __future__ import annotations

import pytest

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage import Commit, RankMarker


def require_damage_is_seen(document: RankMarker | Commit) -> None:
    """All bytes, all bits, all lengths and some tails; 0x20 is the letter's case."""
    data = document.to_bytes()
    for position in range(len(data)):
        for bit in range(8):
            spoilt = bytearray(data)
            spoilt[position] ^= 1 << bit
            with pytest.raises(Corrupt):
                type(document).from_bytes(bytes(spoilt), "here")
    for length in range(len(data)):
        with pytest.raises(Corrupt):
            type(document).from_bytes(data[:length], "here")
    for tail in (b"\n", b" ", b"\0", data):
        with pytest.raises(Corrupt):
            type(document).from_bytes(data + tail, "here")
