"""Encode and decode values without parts for the journal's codec: every bit is kept, with one spelling each.

`LEAF_WRITERS` gives the text of a value's node by its exact type, `LEAF_READERS` the value of a node by its tag.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from datetime import timedelta
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Leaf: TypeAlias = Any
"""JSON value of the codec: None, bool, int, str or a list of nodes."""

LEAST_INT, MOST_INT = -(2**63), 2**63 - 1
"""Range of integers that are stored as JSON numbers."""

TORCH_DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
}
TORCH_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
NUMPY_DTYPES = {
    np.dtype(order + code).str: np.dtype(order + code)
    for order in "<>"
    for code in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
}
FACTORIES: dict[str | None, type | None] = {
    None: None,
    **{cls.__name__: cls for cls in (bool, int, float, str, bytes, list, tuple, set, frozenset, dict)},
}
"""Allowed factories of a `defaultdict`, by name."""


_OF_NUMPY = {torch.float32, torch.float64, torch.int64, torch.bool}
"""The commonest types of tensors that numpy has too, complex ones apart."""
_SMALL_NBYTES = 64


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Return whether the text of a numpy dtype is unique. `longlong` has the text of `int64` and is another type."""
    return dtype.str in NUMPY_DTYPES and NUMPY_DTYPES[dtype.str].char == dtype.char


def tensor_refusal(value: Tensor) -> str | None:
    """Return why a tensor cannot be stored exactly, or `None`."""
    if value.dtype not in TORCH_NAMES:
        return f"tensor of {value.dtype}, which is not a supported dtype"
    if value.layout is not torch.strided or value.is_nested or value.is_meta:
        return f"tensor that is not dense ({value.layout}, on {value.device})"
    return "tensor that requires grad; detach it" if value.requires_grad else None


def tensor_content(value: Tensor) -> memoryview:
    """Return a tensor's elements in row-major order, on the host; shares its memory if possible."""
    if value.dtype in _OF_NUMPY and value.nbytes <= _SMALL_NBYTES and value.is_cpu and not value.is_neg():
        return memoryview(value.numpy().tobytes())  # a scalar, usually, which the calls below would take 4 us for
    return memoryview(value.resolve_conj().resolve_neg().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)


def _text_of_float(value: float) -> str:
    # `float.hex` says "nan" for every NaN; its sign and payload are bits too.
    return f'["n","{struct.pack(">d", value).hex()}"]' if math.isnan(value) else f'["f","{value.hex()}"]'


def _text_of_str(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON would join two lone surrogates into one character
        return f'["s","{value.encode("utf-8", "surrogatepass").hex()}"]'
    return _quoted(value)


def _read_numpy_scalar(args: list[Leaf]) -> np.generic:
    name, text = args
    scalar: np.generic = np.frombuffer(bytes.fromhex(text), NUMPY_DTYPES[name])[0]
    return scalar


LEAF_WRITERS: dict[type, Callable[[Any], str]] = {
    type(None): lambda value: "null",  # noqa: ARG005  # the value is None
    bool: lambda value: "true" if value else "false",
    int: lambda value: str(value) if LEAST_INT <= value <= MOST_INT else f'["i","{value:#x}"]',
    float: _text_of_float,
    str: _text_of_str,
    bytes: lambda value: f'["b","{value.hex()}"]',
    timedelta: lambda value: f'["td",{value.days},{value.seconds},{value.microseconds}]',
    torch.device: lambda value: f'["dv",{_quoted(str(value))}]',
    torch.Size: lambda value: f'["sz"{"".join(f",{item}" for item in value)}]',
}
LEAF_READERS: dict[str, Callable[[list[Leaf]], Any]] = {
    "i": lambda args: int(args[0], 16),
    "f": lambda args: float.fromhex(args[0]),
    "n": lambda args: struct.unpack(">d", bytes.fromhex(args[0]))[0],
    "s": lambda args: bytes.fromhex(args[0]).decode("utf-8", "surrogatepass"),
    "b": lambda args: bytes.fromhex(args[0]),
    "td": lambda args: timedelta(*args),
    "dt": lambda args: TORCH_DTYPES[args[0]],
    "dv": lambda args: torch.device(args[0]),
    "sz": torch.Size,
    "N": _read_numpy_scalar,
}
