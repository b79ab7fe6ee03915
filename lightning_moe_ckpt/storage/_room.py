"""Whether this machine can hold what stored documents say: asked before memory is taken, not when it is too late.

What a document says of sizes may be made up. The kernel grants far more memory than there is, and ends whoever uses it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_MEMORY = Path("/proc/meminfo")


def lacking_memory(nbytes: int) -> str | None:
    """Why so many bytes cannot be had; `None` if they can, or the machine does not say."""
    with suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text(encoding="ascii").splitlines())
        available = int(lines.get("MemAvailable", "").split()[0]) * 1024
        if nbytes > available:
            return f"takes {nbytes} bytes of memory, {available} are available"
    return None
