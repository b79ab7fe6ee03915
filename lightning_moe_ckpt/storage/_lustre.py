"""Striping of a run's directory on Lustre: its large files spread over several servers.

A layout is fixed when a file is written and inherited from its directory, so the hint is given once, to the directory of
a run that is still empty. It is a hint: without `lfs`, on another file system, or where it is refused, files have the
layout that the administrator chose.

Source: the storage study, Sec. 2 (Lustre wiki: 1 to 4 stripes of 4 MiB for files of up to 1 GiB from one client).
"""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
from pathlib import Path

log = logging.getLogger(__name__)

STRIPES, STRIPE_SIZE = 4, "4M"
_MOUNTS = Path("/proc/self/mounts")
_TIMEOUT_SECONDS = 10


def stripe(directory: Path) -> bool:
    """Ask for the layout of files that will be made below `directory`; whether that was accepted."""
    command = shutil.which("lfs")
    if command is None or file_system(directory) != "lustre":
        return False
    arguments = [command, "setstripe", "-c", str(STRIPES), "-S", STRIPE_SIZE, str(directory)]
    try:
        subprocess.run(arguments, check=True, capture_output=True, timeout=_TIMEOUT_SECONDS)  # noqa: S603 - no shell
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("%s keeps the layout it has: %s", directory, error)
        return False
    log.debug("%s: files have %d stripes of %s", directory, STRIPES, STRIPE_SIZE)
    return True


def file_system(path: Path) -> str | None:
    """Type of the file system that `path` is on, such as `lustre`, `nfs4` or `ext4`; `None` where that is not told."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return None
    places = [(Path(_plain(line.split()[1])), line.split()[2]) for line in lines]
    resolved = path.resolve()
    holding = [(len(place.parts), kind) for place, kind in places if place == resolved or place in resolved.parents]
    # Of two mounts at one place the later one counts.
    return max(enumerate(holding), key=lambda each: (each[1][0], each[0]))[1][1] if holding else None


def _plain(text: str) -> str:
    """A name from the table of mounts, which writes blanks and the like as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
