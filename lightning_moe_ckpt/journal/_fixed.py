"""Describe values that cannot change and that the codec does not have, and make them again.

A description is such a value itself, if the codec has its type, or a tuple of a tag and what the value is made of. A journal may
name classes and functions that the process has; of those it can only ask for numbers, texts, tuples and members of enums.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from lightning_moe_ckpt.journal._codec import refusals

Text: TypeAlias = Any
"""Description of a value: itself, if the journal has its type, or a tuple of a tag and what it is made of."""


NATIVE = {type(None), bool, int, float, str, bytes, timedelta, torch.dtype, torch.device, torch.Size, type(Path())}
_NUMBERS: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda value: bytes(memoryview(value)),
}
"""Types of which the user may have a class of their own, and what makes plain values of those."""
_BY_TEXT: dict[type, Callable[[str], Any]] = {
    **{kind: kind for kind in (Decimal, Fraction, complex)},
    **{kind: kind.fromisoformat for kind in (datetime, date, time)},
}


class Missing(Exception):
    """A description refers to an object that this process does not have."""


def fixed(value: Any) -> Text | None:
    """Return the description of an immutable value without parts; `None` for any other value."""
    kind, name = type(value), name_of(type(value))
    text: Text = None
    if isinstance(value, np.generic) and not refusals(value):
        text = value
    elif isinstance(value, Enum):
        text = ("m", name, value.name) if value.name in kind.__members__ else ("M", name, value.value)
    elif kind in _BY_TEXT:
        text = ("x", name, str(value))
    elif isinstance(value, range):
        text = ("r", value.start, value.stop, value.step)
    elif isinstance(value, tuple(_NUMBERS)) and found(name) is kind:
        text = ("s", name, next(plain(value) for base, plain in _NUMBERS.items() if isinstance(value, base)))
    elif isinstance(value, types.FunctionType | types.BuiltinFunctionType | type) and found(name_of(value)) is value:
        text = ("f", name_of(value))
    return text


def read_named(tag: str, kind: Any, args: list[Any]) -> Any:
    """Return the value of a description that names a class or function. Raises `Missing` if there is no such class, or a journal must not
    ask for it.
    """
    bases: dict[str, Any] = {"t": tuple, "m": Enum, "M": Enum, "s": tuple(_NUMBERS), "x": tuple(_BY_TEXT)}
    if tag == "f" and callable(kind):
        return kind
    if not isinstance(kind, type) or not issubclass(kind, bases.get(tag, ())):
        raise Missing(f"{tag} {kind}")
    make: Any = kind
    if tag == "t":
        return make(*args) if hasattr(kind, "_fields") else make(args)
    if tag == "m":
        return make[args[0]]
    return _BY_TEXT[kind](args[0]) if tag == "x" else make(args[0])


def found(name: str) -> Any:
    """Return the class or function of a name, if a module of this process has it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def same_text(first: Text, now: Text) -> bool:
    """Return whether two descriptions without tensors and arrays are equal in type and bits."""
    if first is now or type(first) is not type(now):
        return first is now
    return bool(first == now) and repr(first) == repr(now)


def name_of(kind: Any) -> str:
    """Return the name by which `found` finds a class or function, if its module has it."""
    return f"{kind.__module__}:{kind.__qualname__}"
