"""Named shared memory that outlives its process: a raw file in `/dev/shm`, mapped into a tensor.

The name follows from user, run and rank, not from the process, so a restarted rank finds the file of its last life.
Memory is reserved when the file is made. A tmpfs without room then gives an error that says how much is missing,
where a sparse file would give a SIGBUS in the middle of a copy.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from lightning_moe_ckpt.errors import ConfigurationError

log = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # a tmpfs by definition; names carry the user and are created exclusively
DIRECTORY_VARIABLE = "MOE_CKPT_SHARED_MEMORY"
_RUN_ID = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def shared_directory(fallback: Path | None = None) -> Path:
    """Where rings live: `/dev/shm`, or `fallback` (default: the temporary directory) on machines that have none.

    A fallback on a disk works, but the kernel then writes the ring to that disk now and then. The environment variable
    `MOE_CKPT_SHARED_MEMORY` names another tmpfs; processes that share one are one node to the tiers.
    """
    if chosen := os.environ.get(DIRECTORY_VARIABLE):
        return Path(chosen)
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK):
        return _SHARED_MEMORY
    directory = fallback if fallback is not None else Path(tempfile.gettempdir())
    log.warning(
        "no writable %s: the ring goes to %s and survives a kill there, at the speed of its disk",
        _SHARED_MEMORY,
        directory,
    )
    return directory


def shared_name(run_id: str, rank: int) -> str:
    """File name for the ring of one rank of one run of this user.

    Raises:
        ValueError: `run_id` has characters that a file name should not have.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError(f"`shared_name(run_id={run_id!r})` must be 1 to 100 of the characters A-Z a-z 0-9 _ . -")
    return f"moe-ckpt-{os.getuid()}-{run_id}-{rank}.ring"


def replica_name(run_id: str, owner: int) -> str:
    """File name for copies of the segments of rank `owner`, kept on another node. Raises as `shared_name` does."""
    return shared_name(run_id, owner).removesuffix(".ring") + ".replica"


def create_shared_file(path: Path, nbytes: int) -> None:
    """Make a private file of reserved, zeroed memory; replaces what an earlier life left under that name.

    A process that still maps the old file keeps its pages to itself until it ends.

    Raises:
        ConfigurationError: there is not enough room; the message says how many bytes are missing.
    """
    unlink_shared_file(path)
    expect_room(path.parent, nbytes)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        path.unlink()
        if error.errno != errno.ENOSPC:
            raise
        raise _no_room(path.parent, nbytes, _free_nbytes(path.parent)) from error
    finally:
        os.close(descriptor)


def map_shared_file(path: Path) -> Tensor:
    """The whole file as a writable uint8 tensor, which keeps the mapping alive; the last view to go unmaps it."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Never close this mapping by hand: `frombuffer` holds the object but no buffer, so tensors would dangle.
        return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def unlink_shared_file(path: Path) -> None:
    """Remove the name if it exists; processes that map the file keep their pages."""
    try:
        nbytes = path.lstat().st_size
        path.unlink()
    except FileNotFoundError:
        return
    log.info("removed ring %s of %.1f MiB", path, nbytes / 2**20)


def expect_room(directory: Path, nbytes: int) -> None:
    """Refuse a ring of `nbytes` in `directory` if there is less room than that.

    Raises:
        ConfigurationError: the message says how many bytes are missing.
    """
    free = _free_nbytes(directory)
    if free < nbytes:
        raise _no_room(directory, nbytes, free)


def _free_nbytes(directory: Path) -> int:
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize


def _no_room(directory: Path, nbytes: int, free: int) -> ConfigurationError:
    return ConfigurationError(
        f"A ring of {nbytes} bytes does not fit into {directory}: {free} bytes are free, {nbytes - free} are missing. "
        "Make that file system larger (docker: `--shm-size`), spread the model over more ranks, or lower `max_window`."
    )
