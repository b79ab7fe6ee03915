"""Report the machine's and the installation's means for copies, and the reasons for missing ones.

Each finding says what was found and, if it costs speed or space, how to improve it. Nothing is changed: the one file that is made has no name.
"""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.native._choice import USES, verdict
from lightning_moe_ckpt.native._host_memory import huge_page_nbytes, map_file, num_nodes, populate, take_huge_pages
from lightning_moe_ckpt.native._library import Library, cuda, explain

PartState = Literal["good", "slower", "absent"]
_DRIVER = Path("/proc/driver/nvidia/version")
_SHARED_MEMORY = Path(os.environ.get("MOE_CKPT_SHARED_MEMORY", "/dev/shm"))  # noqa: S108  # tried by a file without a name
_SMALL_NBYTES = 2**30
"""Shared memory below this size is too small for the ring of a real model."""


@dataclass(frozen=True, slots=True)
class Examined:
    """Result of an examination."""

    name: str
    state: PartState
    """`good`; `slower`: works with less speed or room; `absent`: not there, a fallback is used."""
    found: str
    advice: str = ""
    """Remedy; empty if nothing needs to change."""


_Finding = tuple[PartState, str] | tuple[PartState, str, str]
"""State, what was found, and advice."""


def examine() -> list[Examined]:
    """Examine everything; takes well under a second."""
    return [*_parts(), *_devices(), *(Examined(name, *look()) for name, look in _LOOKS.items())]


def _parts() -> Iterator[Examined]:
    rebuild = "install again with a compiler at hand; `pip install -v` shows what it says"
    for part in explain():
        name = f"compiled {part.part.upper()} part"
        if part.active:
            yield Examined(name, "good", part.reason)
            continue
        useless = "MOE_CKPT_NATIVE=0" in part.reason or (part.part == "cuda" and not torch.cuda.is_available())
        yield Examined(name, "absent", f"not in use, torch does its work: {part.reason}", "" if useless else rebuild)


def _devices() -> list[Examined]:
    """Return a finding per device on the CUDA part; none if the part is not in use."""
    if (library := cuda()) is None:
        return []
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [Examined(f"CUDA part on {device}", *_device(library, device)) for device in devices]


def _device(library: Library, device: torch.device) -> _Finding:
    verdicts = {use: verdict(use, library, device) for use in USES}
    failures = [f"{use}: {found.failure}" for use, found in verdicts.items() if found.failure is not None]
    seconds = sum(found.seconds for found in verdicts.values())
    if not failures:
        return "good", f"{', '.join(USES)} give the bits of their twins, checked in {1e3 * seconds:.0f} ms"
    found = f"fails its check, torch does this work: {'; '.join(failures)}"
    return "slower", found, "report it, with this table; nothing is lost but speed"


def _compiler() -> _Finding:
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        return "absent", "no g++, and CXX names none", "needed to build"
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)  # noqa: S603
    return "good", f"{path}, {(done.stdout or done.stderr).partition(chr(10))[0]}"


def _cuda_compiler() -> _Finding:
    homes = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    found = [*(shutil.which("nvcc", path=str(home)) for home in homes), os.environ.get("NVCC"), shutil.which("nvcc")]
    found += [str(path) for path in sorted(Path("/usr/local").glob("cuda*/bin/nvcc"), reverse=True)]
    of_pip = find_spec("nvidia")
    folders = of_pip.submodule_search_locations or [] if of_pip is not None else []
    found += [str(path) for folder in folders for path in Path(folder).glob("cu*/bin/nvcc")]
    path = next((path for path in found if path), None)
    return ("absent", "no nvcc", "needed to build the CUDA part") if path is None else ("good", path)


def _driver() -> _Finding:
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if devices:
        return "good", ", ".join(devices)
    if not _DRIVER.exists():
        return "absent", "no NVIDIA driver on this machine"
    found = f"{_DRIVER.read_text().partition(chr(10))[0]}; torch {torch.__version__} sees no device"
    return "absent", found, "install a torch built for this driver"


def _shared_memory() -> _Finding:
    if not (_SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)):
        found = f"{_SHARED_MEMORY} is not there or cannot be written; rings go to the temporary directory"
        return "slower", found, "mount a tmpfs there"
    stats = os.statvfs(_SHARED_MEMORY)
    size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    found = f"{size_text(free)} of {size_text(size)} free in {_SHARED_MEMORY}"
    return ("good", found) if size >= _SMALL_NBYTES else ("slower", found, "make it larger (docker: `--shm-size`)")


def _locked_memory() -> _Finding:
    soft, hard = (_limit(value) for value in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    found = soft if soft == hard else f"{soft}, may be raised to {hard}"
    if "unlimited" not in (soft, hard) and torch.cuda.is_available():
        return "slower", found, "`ulimit -l unlimited`, should registering a ring fail"
    return "good", found


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else size_text(value)


def _pages() -> _Finding:
    """Try what rings get: a kernel may give huge pages whatever the mount says, and another may not although it could."""
    if not (_SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)):
        return "absent", f"no {_SHARED_MEMORY} to try"
    try:
        with tempfile.TemporaryFile(dir=_SHARED_MEMORY) as file:
            file.truncate(huge_page_nbytes() or mmap.PAGESIZE)
            taken = take_huge_pages(file.fileno(), memory := map_file(file.fileno()))
            ahead = "" if populate(memory.data_ptr(), memory.nbytes) else ", nor can pages be mapped ahead (Linux 5.14)"
    except OSError as error:
        return "absent", f"{_SHARED_MEMORY} cannot be tried: {error.strerror}"
    if taken:
        return "good", f"rings in {_SHARED_MEMORY} have pages of {size_text(taken)}"
    found = f"no huge pages in {_SHARED_MEMORY}{ahead}: starts, restarts and the first copies take longer"
    return "slower", found, f"Linux 6.1, or `mount -o remount,huge=within_size {_SHARED_MEMORY}` where it is a tmpfs"


_LOOKS: dict[str, Callable[[], _Finding]] = {
    "C++ compiler": _compiler,
    "CUDA compiler": _cuda_compiler,
    "CUDA devices": _driver,
    "shared memory": _shared_memory,
    "locked memory": _locked_memory,
    "huge pages": _pages,
    "memory nodes": lambda: ("good", str(num_nodes())),
}
