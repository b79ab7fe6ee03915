"""Write and read sizes and times: one unit for bytes in output, and every usual spelling in input."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from lightning_moe_ckpt.errors import ConfigurationError

_KINDS_OF_TIME = {
    "ms": 1e-3,
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
"""Seconds of each unit, in lower case."""
_KINDS_OF_SIZE = {"": 1, "b": 1} | {
    f"{letter}{infix}b": int(base**power)
    for power, letter in enumerate("kmgt", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}
"""Bytes of each unit, in lower case."""
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*")
_CLOCK = re.compile(r"\s*(?:([0-9]+) days?,? )?([0-9]+):([0-5][0-9])(?::([0-5][0-9](?:\.[0-9]+)?))?\s*")


def size_text(nbytes: float) -> str:
    """Return bytes as `3.25 MiB`, or as `1.50 GiB` from 1 GiB on."""
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.2f} GiB"
    text = f"{nbytes / 2**20:.2f} MiB"
    return "<0.01 MiB" if nbytes > 0 and text == "0.00 MiB" else text


def rate_text(nbytes_per_second: float) -> str:
    """Return bytes per second in the units of `size_text`."""
    return f"{size_text(nbytes_per_second)}/s"


def read_size(text: object) -> int:
    """Return bytes that a whole number or text such as `400MB` or `1.5 GiB` says. Raises `ValueError` for any other
    value, or less than one byte.
    """
    found = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    unit = None if found is None else _KINDS_OF_SIZE.get(found[2].lower())
    if isinstance(text, int) and not isinstance(text, bool) and text >= 1:
        return int(text)
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise ValueError(
            "must be 1 or more bytes: a whole number, or text such as '400MB' or '1.5GiB' (kB, MB, GB, TB of 1000, KiB, MiB, GiB, "
            "TiB of 1024)"
        )
    return round(float(found[1]) * unit)


def read_duration(value: object) -> timedelta:
    """Return the time that a `timedelta`, a number of seconds, or text such as `25`, `90s`, `10 min` or `0:10:00` says.
    Raises `ValueError` for any other value, or a negative time.
    """
    seconds: float | None = None
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and (clock := _CLOCK.fullmatch(value)) is not None:
        days, hours, minutes, rest = (float(part or 0) for part in clock.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    elif isinstance(value, str) and (found := _QUANTITY.fullmatch(value)) is not None:
        unit = _KINDS_OF_TIME.get(found[2].lower())
        seconds = None if unit is None else float(found[1]) * unit
    if seconds is None or not 0 <= seconds <= timedelta.max.total_seconds():
        raise ValueError("must be a time of 0 or more: seconds, or text such as '25s', '10min', '1.5h' or '0:10:00'")
    return value if isinstance(value, timedelta) else timedelta(seconds=seconds)


def number_of_bytes(owner: object, name: str, value: object, *, also: Sequence[object] = ()) -> Any:
    """Return the bytes that an argument of `owner`'s constructor says, a whole number or text such as `400MB` or `1.5
    GiB`; or the value itself if it is one of `also`. Raises `ConfigurationError` with the call if the value is neither,
    or below a byte.
    """
    if any(value is each or value == each for each in also) and not isinstance(value, bool):
        return value
    try:
        return read_size(value)
    except ValueError as error:
        others = "".join(f"{each!r} or " for each in also)
        wanted = str(error).replace("must be ", f"must be {others}")
        raise ConfigurationError(f"`{type(owner).__name__}({name}={value!r})` {wanted}.") from error


def duration(owner: object, name: str, value: object) -> timedelta:
    """Return the time that an argument of `owner`'s constructor says: a `timedelta`, seconds, or text such as `90s` or
    `10min`. Raises `ConfigurationError` with the call for any other value, or a negative time.
    """
    try:
        return read_duration(value)
    except ValueError as error:
        raise ConfigurationError(f"`{type(owner).__name__}({name}={value!r})` {error}.") from error


def time_text(seconds: float) -> str:
    """Return a duration in its two largest units, such as `4.2 s` (of a float), `42 s`, `3 min 20 s`, `5 h 7 min` or `3 d 4 h`."""
    if (seconds := max(type(seconds)(0), seconds)) < 10 and isinstance(seconds, float):
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for large, small, of_large, of_small in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= of_large:
            number, rest = divmod(whole, of_large)
            return f"{number} {large}" + (f" {rest // of_small} {small}" if rest // of_small else "")
    return f"{whole} s"
