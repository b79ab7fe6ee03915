"""Parts that an object gets only once it has begun."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def made(part: T | None) -> T:
    """The part. Nobody may ask for it before the beginning."""
    assert part is not None
    return part
