"""Report the machine's and the installation's means for copies, and the reasons for missing ones.

Each finding says what was found and, if it costs speed or space, how to improve it. Nothing is changed.
"""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.native._choice import USES, verdict
from lightning_moe_ckpt.native._host_memory import num_nodes, populate
from lightning_moe_ckpt.native._library import Library, cuda, explain

PartState = Literal["good", "slower", "absent"]
_DRIVER = Path("/proc/driver/nvidia/version")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # looked at, not written to
_SMALL_NBYTES = 2**30
"""Shared memory below this size is too small for the ring of a real model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """Result of an examination."""

    name: str
    state: PartState
    """`good`; `slower`: works with less speed or room; `absent`: not there, a fallback is used."""
    found: str
    advice: str = ""
    """Remedy; empty if nothing needs to change."""


def examine() -> list[Examined]:
    """Examine everything; takes well under a second."""
    return [
        *_parts(),
        *_devices(),
        _compiler(),
        _cuda_compiler(),
        _driver(),
        _shared_memory(),
        _locked_memory(),
        _huge_pages(),
        _nodes(),
        _mapping_ahead(),
    ]


def _parts() -> list[Examined]:
    rebuild = "install again with a compiler at hand; `pip install -v` shows what it says"
    advice = {"cpu": rebuild, "cuda": "" if not torch.cuda.is_available() else rebuild}
    return [
        Examined(
            name=f"compiled {part.part.upper()} part",
            state="good" if part.active else "absent",
            found=part.reason if part.active else f"not in use, torch does its work: {part.reason}",
            advice="" if part.active or "MOE_CKPT_NATIVE=0" in part.reason else advice[part.part],
        )
        for part in explain()
    ]


def _devices() -> list[Examined]:
    """Return a finding per device on the CUDA part; none if the part is not in use."""
    library = cuda()
    if library is None:
        return []
    return [_device(library, torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


def _device(library: Library, device: torch.device) -> Examined:
    verdicts = {use: verdict(use, library, device) for use in USES}
    failures = [f"{use}: {found.failure}" for use, found in verdicts.items() if found.failure is not None]
    seconds = sum(found.seconds for found in verdicts.values())
    if not failures:
        found = f"{', '.join(USES)} give the bits of their twins, checked in {1e3 * seconds:.0f} ms"
        return Examined(name=f"CUDA part on {device}", state="good", found=found)
    return Examined(
        name=f"CUDA part on {device}",
        state="slower",
        found=f"fails its check, torch does this work: {'; '.join(failures)}",
        advice="report it, with this table; nothing is lost but speed",
    )


def _compiler() -> Examined:
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        return Examined(
            name="C++ compiler", state="absent", found="no g++, and CXX names none", advice="needed to build"
        )
    return Examined(name="C++ compiler", state="good", found=f"{path}, {_first_line([path, '--version'])}")


def _cuda_compiler() -> Examined:
    homes = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    found = [shutil.which("nvcc", path=str(home)) for home in homes]
    found += [os.environ.get("NVCC"), shutil.which("nvcc")]
    found += [str(path) for path in sorted(Path("/usr/local").glob("cuda*/bin/nvcc"), reverse=True)]
    of_pip = find_spec("nvidia")
    folders = of_pip.submodule_search_locations or [] if of_pip is not None else []
    found += [str(path) for folder in folders for path in Path(folder).glob("cu*/bin/nvcc")]
    path = next((path for path in found if path), None)
    if path is None:
        return Examined(name="CUDA compiler", state="absent", found="no nvcc", advice="needed to build the CUDA part")
    return Examined(name="CUDA compiler", state="good", found=path)


def _first_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)  # noqa: S603
    return (done.stdout or done.stderr).partition("\n")[0]


def _driver() -> Examined:
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if devices:
        return Examined(name="CUDA devices", state="good", found=", ".join(devices))
    if _DRIVER.exists():
        return Examined(
            name="CUDA devices",
            state="absent",
            found=f"{_DRIVER.read_text().partition(chr(10))[0]}; torch {torch.__version__} sees no device",
            advice="install a torch built for this driver",
        )
    return Examined(name="CUDA devices", state="absent", found="no NVIDIA driver on this machine")


def _shared_memory() -> Examined:
    if not (_SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)):
        return Examined(
            name="shared memory",
            state="slower",
            found=f"{_SHARED_MEMORY} is not there or cannot be written; rings go to the temporary directory",
            advice="mount a tmpfs there",
        )
    stats = os.statvfs(_SHARED_MEMORY)
    size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    return Examined(
        name="shared memory",
        state="good" if size >= _SMALL_NBYTES else "slower",
        found=f"{size_text(free)} of {size_text(size)} free in {_SHARED_MEMORY}",
        advice="" if size >= _SMALL_NBYTES else "make it larger (docker: `--shm-size`)",
    )


def _locked_memory() -> Examined:
    soft, hard = (_limit(value) for value in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    short = "unlimited" not in (soft, hard) and torch.cuda.is_available()
    return Examined(
        name="locked memory",
        state="slower" if short else "good",
        found=soft if soft == hard else f"{soft}, may be raised to {hard}",
        advice="`ulimit -l unlimited`, should registering a ring fail" if short else "",
    )


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else size_text(value)


def _huge_pages() -> Examined:
    path = _HUGE_PAGES / "shmem_enabled"
    if not path.exists():
        return Examined(name="huge pages", state="absent", found="the kernel has none for shared memory")
    chosen = path.read_text().partition("[")[2].partition("]")[0]
    state: PartState = "good" if chosen in ("always", "within_size", "advise") else "absent"
    return Examined(name="huge pages", state=state, found=f"{chosen} for shared memory")


def _nodes() -> Examined:
    return Examined(name="memory nodes", state="good", found=str(num_nodes()))


def _mapping_ahead() -> Examined:
    memory = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)
    if populate(memory.data_ptr(), memory.nbytes):
        return Examined(name="mapping ahead", state="good", found="MADV_POPULATE_WRITE works")
    return Examined(
        name="mapping ahead",
        state="slower",
        found="the kernel has no MADV_POPULATE_WRITE; the first copies into a ring are slow",
        advice="Linux 5.14 or newer",
    )
