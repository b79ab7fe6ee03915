"""Load the compiled libraries on first use, and explain why a part is missing.

Loading never raises: if a part is absent, of another version than this package, or cannot run on this machine,
`explain` reports it, and its functions run in Python. Loading touches no device, and importing loads nothing.

Environment: `MOE_CKPT_NATIVE=0` switches all compiled code off; `MOE_CKPT_NATIVE_PATH` names another folder of
libraries, such as one built with a sanitizer.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native import _prototypes
from lightning_moe_ckpt.native._prototypes import ABI, Error, Prototype

log = rank_logger(__name__)

LibraryPart = Literal["cpu", "cuda"]

_REBUILD = "rebuild it with `pip install .` or `python ext/build_native.py`"


class NativeError(CheckpointError, RuntimeError):
    """A compiled function failed; the message says what it found."""


class Library:
    """One loaded library, `cpu` or `cuda`. Its functions are attributes of this object, by their C names, and raise `NativeError`."""

    def __init__(self, handle: ctypes.CDLL, part: LibraryPart) -> None:
        self.part = part
        prototypes = _prototypes.CPU if part == "cpu" else _prototypes.CUDA
        for name, prototype in prototypes.items():
            setattr(self, name, _bind(getattr(handle, name), prototype))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # Reached for undeclared names only; its presence tells type checkers that there are attributes.
        raise AttributeError(f"{name} is not declared in _prototypes.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartStatus:
    """State of a part: whether it is in use."""

    part: LibraryPart
    library: Library | None
    reason: str
    """Reason why the part is not in use, or a description; one line."""

    @property
    def active(self) -> bool:
        return self.library is not None


def cpu() -> Library | None:
    """Return the CPU part; `None` if its functions have to run in Python."""
    return status("cpu").library


def cuda() -> Library | None:
    """Return the CUDA part; `None` without the part, or without a device."""
    return status("cuda").library


def explain() -> list[PartStatus]:
    """Return every part's status, with the reason."""
    return [status("cpu"), status("cuda")]


@functools.cache
def status(part: LibraryPart) -> PartStatus:
    """Load a part, once per process."""
    try:
        library = _load(part)
        described = f"built by {library.moe_cpu_compiler().decode()}" if part == "cpu" else _describe_cuda(library)
    except _Missing as missing:
        level = logging.WARNING if missing.unexpected else logging.DEBUG
        log.log(level, "the compiled %s part is not in use: %s", part, missing)
        return PartStatus(part=part, library=None, reason=str(missing))
    return PartStatus(part=part, library=library, reason=described)


class _Missing(Exception):
    def __init__(self, reason: str, *, unexpected: bool = False) -> None:
        super().__init__(reason)
        self.unexpected = unexpected


def _load(part: LibraryPart) -> Library:
    if os.environ.get("MOE_CKPT_NATIVE") == "0":
        raise _Missing("switched off by MOE_CKPT_NATIVE=0")
    path = Path(os.environ.get("MOE_CKPT_NATIVE_PATH") or Path(__file__).parent) / f"libmoe_ckpt_{part}.so"
    if not path.exists():
        told = cpu() if part == "cuda" else None  # the CPU part has the build's note on the CUDA part
        note = f": {told.moe_cpu_build_note().decode()}" if told is not None else ""
        raise _Missing(f"{path} was not built{note}")
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise _Missing(f"{path} cannot be loaded: {error}", unexpected=True) from error
    _expect_current(path, handle, part, _prototypes.CPU if part == "cpu" else _prototypes.CUDA)
    return Library(handle, part)


def _expect_current(path: Path, handle: ctypes.CDLL, part: LibraryPart, prototypes: Mapping[str, Prototype]) -> None:
    """Refuse a library of another version: its signatures differ, so calling it would crash."""
    if lacking := [name for name in prototypes if not hasattr(handle, name)]:
        raise _Missing(f"{path} is stale, it lacks {', '.join(lacking)}; {_REBUILD}", unexpected=True)
    if (found := int(getattr(handle, f"moe_{part}_abi")())) != ABI:
        raise _Missing(f"{path} has interface version {found}, this package {ABI}; {_REBUILD}", unexpected=True)
    stored = _bind(getattr(handle, f"moe_{part}_source_digest"), prototypes[f"moe_{part}_source_digest"])().decode()
    sources = _source_digest()
    if stored and sources and stored != sources:
        raise _Missing(f"{path} is older than the sources in ext/csrc; {_REBUILD}", unexpected=True)


@functools.cache
def _source_digest() -> str:
    """Compute `source_digest` of ext/build_native.py in a checkout; empty in an installed package."""
    folder = Path(__file__).resolve().parents[2] / "ext" / "csrc"
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16] if folder.is_dir() else ""


def _describe_cuda(library: Library) -> str:
    runtime, driver = library.moe_cuda_runtime_version(), library.moe_cuda_driver_version()
    if driver == 0:
        raise _Missing(f"built for CUDA {_version(runtime)}, but this machine has no NVIDIA driver")
    count = ctypes.c_int32()
    try:
        library.moe_cuda_device_count(count)
    except NativeError as error:
        raise _Missing(f"built for CUDA {_version(runtime)}, the driver is for {_version(driver)}: {error}") from error
    if count.value == 0:
        raise _Missing(f"built for CUDA {_version(runtime)}, but there is no device")
    return f"built for CUDA {_version(runtime)}, driver for {_version(driver)}, {count.value} devices"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _bind(function: Any, prototype: Prototype) -> Callable[..., Any]:
    function.restype = prototype.result
    function.argtypes = [*prototype.arguments, *([ctypes.POINTER(Error)] if prototype.can_fail else [])]

    def call(*arguments: Any) -> int:
        error = Error()
        result: int = function(*arguments, error)
        if result < 0:
            raise NativeError(error.message.decode(errors="replace"))
        return result

    return call if prototype.can_fail else function
