"""What figures were measured on: without it they mean nothing a week later."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import lightning
import torch

_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Hardware, versions and the time of a measurement."""

    date: str
    """UTC, to the second, ISO 8601."""
    system: str
    cpu: str
    num_cores: int
    """Cores this process may use."""
    load: float
    """Processes that were running or waiting for a core in the last minute, ours not included at start; -1 unknown."""
    memory_nbytes: int
    python: str
    torch: str
    lightning: str
    devices: str
    """Names and drivers of the GPUs, as `nvidia-smi` says; empty where there is none."""

    @classmethod
    def read(cls) -> Machine:
        """This one, now."""
        return cls(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            system=platform.platform(terse=True),
            cpu=_cpu_name(),
            num_cores=_num_cores(),
            load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else -1.0,
            memory_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            python=platform.python_version(),
            torch=torch.__version__,
            lightning=lightning.__version__,
            devices=_devices(),
        )

    def __str__(self) -> str:
        return (
            f"{self.date}, {self.cpu}, {self.num_cores} cores at load {self.load}, "
            f"{self.memory_nbytes / 2**30:.0f} GiB, {self.system}, "
            f"Python {self.python}, torch {self.torch}, Lightning {self.lightning}{f', {self.devices}' if self.devices else ''}"
        )


def _cpu_name() -> str:
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _devices() -> str:
    """The driver is not asked in this process, which may have to fork."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)  # noqa: S603
    return "; ".join(done.stdout.splitlines()) if done.returncode == 0 else ""


def _num_cores() -> int:
    # macOS cannot restrict a process to some cores.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
