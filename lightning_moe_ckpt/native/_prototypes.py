"""Signature of every function of the compiled libraries, declared once.

A test compares the tables with the symbols that the libraries export. `ABI` is raised together with `kAbi` in
ext/csrc/abi.hpp whenever a signature or the meaning of an argument changes.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ABI = 5

MESSAGE_NBYTES = 512


class Error(c.Structure):
    """Message of a failed function; mirrors `Error` of abi.hpp."""

    _fields_ = (("message", c.c_char * MESSAGE_NBYTES),)


class Slice(c.Structure):
    """Copy of a plan; mirrors `Slice` of slice.hpp."""

    _fields_ = (
        ("dst", c.c_uint64),
        ("src", c.c_uint64),
        ("count", c.c_uint64),
        ("rows", c.c_uint64),
        ("dst_stride", c.c_int64),
        ("src_stride", c.c_int64),
        ("cast", c.c_int32),
        ("dst_space", c.c_int32),
        ("src_space", c.c_int32),
        ("is_relative", c.c_int32),
    )


class Pieces(c.Structure):
    """Host memory registered in pieces; mirrors `Pieces` of plan.hpp."""

    _fields_ = (("base", c.c_uint64), ("end", c.c_uint64), ("piece_nbytes", c.c_uint64))


class PlanOptions(c.Structure):
    """Settings for arranging a plan; mirrors `PlanOptions` of plan.hpp."""

    _fields_ = (
        *((name, c.c_uint64) for name in ("chunk_nbytes", "chunk_copies", "pack_below")),
        *((name, c.c_int32) for name in ("has_device", "bfloat16_nan")),
    )


class GateCounts(c.Structure):
    """Chunks copied so far, by phase of a schedule, and gaps of its last pass; mirrors `GateCounts` of gate.hpp."""

    _fields_ = tuple((name, c.c_uint64) for name in ("outside", "beside", "in_gaps", "gap_ns", "passes"))


class Xxh3(c.Structure):
    """Functions of the `xxhash` package, by address; mirrors `Xxh3` of cpu_digest.cpp."""

    _fields_ = tuple((name, c.c_void_p) for name in ("once", "create", "free", "reset", "update", "digest"))


@dataclass(frozen=True, slots=True)
class Prototype:
    """Signature of a C function."""

    result: Any
    """ctypes type; `None` for void."""
    arguments: tuple[Any, ...]
    """ctypes types, without the trailing `Error*` of a function that can fail."""
    can_fail: bool = False
    """Whether the function takes an `Error*` last, and returns a negative result on failure."""


def plain(result: Any, *arguments: Any) -> Prototype:
    """Declare a function that cannot fail."""
    return Prototype(result, arguments)


def fallible(*arguments: Any) -> Prototype:
    """Declare a function to return a negative `int` on failure and takes an `Error*` last."""
    return Prototype(c.c_int, arguments, can_fail=True)


_GRADIENT = (c.c_void_p, c.c_int32, c.c_int64)
"""Elements, dtype code, number of elements."""
_SPARSE = (c.c_void_p, c.c_void_p, c.c_int64, c.c_void_p, c.c_void_p)
"""Values, indices, capacity, tiles, counts."""
_ADAM = (*[c.c_void_p] * 4, c.c_int64, c.c_void_p, c.c_int64)
"""Parameter, three moments (the last may be null), number of elements; steps, number of steps."""
_STREAM = (c.c_int, c.c_void_p)
_HANDLE = c.c_void_p
_HANDLE_OUT = c.POINTER(c.c_void_p)
_U64_OUT = c.POINTER(c.c_uint64)


def _plan(part: str) -> dict[str, Prototype]:
    """Declare the plan functions, which are the same in both libraries."""
    return {
        f"moe_{part}_plan_create": fallible(
            c.c_void_p, c.c_uint64, c.POINTER(PlanOptions), c.POINTER(Pieces), c.c_uint64, _HANDLE_OUT
        ),
        f"moe_{part}_plan_free": plain(None, _HANDLE),
        f"moe_{part}_plan_nbytes": plain(c.c_uint64, _HANDLE),
        f"moe_{part}_plan_bounce_nbytes": plain(c.c_uint64, _HANDLE),
        f"moe_{part}_plan_staging_nbytes": plain(c.c_uint64, _HANDLE),
        f"moe_{part}_plan_attach": fallible(_HANDLE, c.c_uint64, c.c_uint64),
        f"moe_{part}_plan_num_chunks": plain(c.c_uint64, _HANDLE),
        f"moe_{part}_plan_copies": plain(c.c_uint64, _HANDLE, c.c_uint64, c.POINTER(Slice), c.c_uint64),
        f"moe_{part}_engine_stop": plain(c.c_int32, _HANDLE, c.c_int64),
        f"moe_{part}_engine_free": plain(c.c_int32, _HANDLE, c.c_int64),
        f"moe_{part}_engine_event_fd": plain(c.c_int32, _HANDLE),
        f"moe_{part}_engine_wait": fallible(_HANDLE, c.c_uint64, c.c_int64),
        f"moe_{part}_engine_fit": plain(None, _HANDLE, c.c_uint64),
        f"moe_{part}_engine_counts": plain(None, _HANDLE, c.POINTER(GateCounts)),
    }


CPU: Mapping[str, Prototype] = {
    "moe_cpu_abi": plain(c.c_int32),
    "moe_cpu_source_digest": plain(c.c_char_p),
    "moe_cpu_build_note": plain(c.c_char_p),
    "moe_cpu_compiler": plain(c.c_char_p),
    "moe_quantize": fallible(c.c_void_p, c.c_int64, c.c_int),
    "moe_sample_threshold": fallible(*_GRADIENT, c.c_int64, c.c_int64, c.POINTER(c.c_uint32)),
    "moe_select": fallible(*_GRADIENT, c.c_uint32, *_SPARSE, c.c_int),
    "moe_adam_replay": fallible(*_ADAM, c.c_int, c.c_void_p, c.c_int),
    "moe_digest_ranges": fallible(
        c.POINTER(Xxh3), c.c_void_p, c.c_uint64, c.c_void_p, c.c_uint64, c.c_char_p, c.c_void_p, c.c_char_p
    ),
    "moe_spell_rows": fallible(c.c_void_p, c.c_uint64, c.c_uint64, c.c_void_p, c.c_uint64, _U64_OUT),
    "moe_read_records": fallible(c.c_void_p, c.c_uint64, c.c_char_p, c.c_uint64, *[c.c_void_p] * 4, _U64_OUT),
    "moe_append": plain(c.c_int32, c.c_int32, c.c_void_p, c.c_uint64, c.c_uint64),
    **_plan("cpu"),
    "moe_cpu_plan_run": fallible(_HANDLE, c.c_int32),
    "moe_cpu_engine_create": fallible(c.c_int32, c.c_int32, _HANDLE_OUT),
    "moe_cpu_engine_enter": fallible(_HANDLE, c.c_int32),
    "moe_cpu_engine_submit": fallible(_HANDLE, _HANDLE, c.c_uint64, _U64_OUT),
}

CUDA: Mapping[str, Prototype] = {
    "moe_cuda_abi": plain(c.c_int32),
    "moe_cuda_source_digest": plain(c.c_char_p),
    "moe_cuda_runtime_version": plain(c.c_int32),
    "moe_cuda_driver_version": plain(c.c_int32),
    "moe_cuda_device_count": fallible(c.POINTER(c.c_int32)),
    **_plan("cuda"),
    "moe_cuda_plan_num_units": plain(c.c_uint64, _HANDLE),
    "moe_cuda_plan_units": plain(None, _HANDLE, c.POINTER(Slice)),
    "moe_cuda_plan_set_units": plain(None, _HANDLE, c.c_uint64),
    "moe_cuda_engine_create": fallible(c.c_int32, c.c_int32, _HANDLE_OUT),
    "moe_cuda_engine_set_registered": plain(None, _HANDLE, c.c_int32),
    "moe_cuda_engine_enter": fallible(_HANDLE, c.c_int32, c.c_void_p),
    "moe_cuda_engine_submit": fallible(_HANDLE, _HANDLE, c.c_uint64, c.c_void_p, _U64_OUT),
    "moe_cuda_engine_fence": fallible(_HANDLE, c.c_uint64, c.c_void_p),
    "moe_cuda_register": fallible(c.c_int32, c.c_void_p, c.c_uint64),
    "moe_cuda_unregister": fallible(c.c_int32, c.c_void_p),
    "moe_cuda_quantize": fallible(c.c_void_p, c.c_int64, *_STREAM),
    "moe_cuda_select": fallible(*_GRADIENT, c.c_int64, c.c_int64, *_SPARSE, c.c_void_p, *_STREAM),
    "moe_cuda_adam_replay": fallible(*_ADAM, *_STREAM),
}
