"""What pytest has imported, arranged for fits that collect garbage and for forks."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

_HUGE = 2**21
_MADV_COLLAPSE = 25
"""Since Linux 6.1; an older kernel refuses it, and forks take longer."""


def freeze_heap() -> None:
    """Keep what is alive out of collections: a million objects take one half a second."""
    gc.collect()
    gc.freeze()
    join_pages()


def join_pages() -> None:
    """Keep the heap in huge pages, of which a fork copies one entry in place of 512: it takes half of the time.

    Writing to one while a fork is alive makes small pages of it again.
    """
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, access, _, _, inode, *name = line.split()
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            for address in range(-(-begin // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
                madvise(ctypes.c_void_p(address), ctypes.c_size_t(_HUGE), _MADV_COLLAPSE)


class JoinedPages:
    """Joins the pages of this process before its first fork since it was last told that forks have split them."""

    def __init__(self) -> None:
        self._owner, self._split = os.getpid(), False
        os.register_at_fork(before=self._join)

    def split(self) -> None:
        """Note that there may be small pages."""
        self._split = True

    def _join(self) -> None:
        if self._split and os.getpid() == self._owner:
            self._split = False
            join_pages()
