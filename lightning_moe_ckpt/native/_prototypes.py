"""Signature of every function of the compiled libraries, declared once.

A test compares the tables with the symbols that the libraries export. `ABI` is raised together with `kAbi` in
ext/csrc/abi.hpp whenever a signature or the meaning of an argument changes.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ABI = 1

MESSAGE_NBYTES = 512


class Error(c.Structure):
    """What a function that failed has to say; mirrors `Error` of abi.hpp."""

    _fields_ = (("message", c.c_char * MESSAGE_NBYTES),)


@dataclass(frozen=True, slots=True)
class Prototype:
    """One C function."""

    result: Any
    """ctypes type; `None` for void."""
    arguments: tuple[Any, ...]
    """ctypes types, without the trailing `Error*` of a function that can fail."""
    can_fail: bool = False
    """It takes an `Error*` last, and a negative result means failure."""


def plain(result: Any, *arguments: Any) -> Prototype:
    """A function that cannot fail."""
    return Prototype(result, arguments)


def fallible(*arguments: Any) -> Prototype:
    """A function that returns a negative `int` on failure and takes an `Error*` last."""
    return Prototype(c.c_int, arguments, can_fail=True)


_GRADIENT = (c.c_void_p, c.c_int32, c.c_int64)
"""Elements, dtype code, how many."""
_SPARSE = (c.c_void_p, c.c_void_p, c.c_int64, c.c_void_p, c.c_void_p)
"""Values, indices, capacity, tiles, counts."""
_ADAM = (*[c.c_void_p] * 4, c.c_int64, c.c_void_p, c.c_int64)
"""Parameter, three moments (the last may be null), how many elements; steps, how many."""
_STREAM = (c.c_int, c.c_void_p)
"""Device index and stream."""

CPU: Mapping[str, Prototype] = {
    "moe_cpu_abi": plain(c.c_int32),
    "moe_cpu_source_digest": plain(c.c_char_p),
    "moe_cpu_build_note": plain(c.c_char_p),
    "moe_cpu_compiler": plain(c.c_char_p),
    "moe_quantize": fallible(c.c_void_p, c.c_int64, c.c_int),
    "moe_sample_threshold": fallible(*_GRADIENT, c.c_int64, c.c_int64, c.POINTER(c.c_uint32)),
    "moe_select": fallible(*_GRADIENT, c.c_uint32, *_SPARSE, c.c_int),
    "moe_adam_replay": fallible(*_ADAM, c.c_int, c.c_void_p, c.c_int),
}

CUDA: Mapping[str, Prototype] = {
    "moe_cuda_abi": plain(c.c_int32),
    "moe_cuda_source_digest": plain(c.c_char_p),
    "moe_cuda_runtime_version": plain(c.c_int32),
    "moe_cuda_driver_version": plain(c.c_int32),
    "moe_cuda_device_count": fallible(c.POINTER(c.c_int32)),
    "moe_cuda_quantize": fallible(c.c_void_p, c.c_int64, *_STREAM),
    "moe_cuda_select": fallible(*_GRADIENT, c.c_int64, c.c_int64, *_SPARSE, c.c_void_p, *_STREAM),
    "moe_cuda_adam_replay": fallible(*_ADAM, *_STREAM),
}
