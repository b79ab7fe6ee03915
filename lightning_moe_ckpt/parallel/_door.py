"""Process groups that are whole answer no stranger: their listening sockets drop what comes, from then on.

gloo accepts whoever connects for as long as a group lives, and keeps connections that never say which pair they are of.
When the process has no descriptor left, `accept` fails, and gloo ends the process (measured with torch 2.13: 250 silent
connections and a limit of 256). But all pairs of a group are connected when `new_group` returns, and none is ever connected
again. So a filter that lets nothing pass is put on the sockets that began to listen meanwhile: a stranger's connection is
not even begun then, takes no descriptor, no memory and no thread, and connections that are there are not touched.

Sockets filter on Linux alone; elsewhere they stay as gloo has them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)

_DESCRIPTORS = Path("/proc/self/fd")
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A program of the kernel's packet filter: return 0, that is pass no byte on."""
_LAZY = "TORCH_GLOO_LAZY_INIT"
"""With it pairs are connected when they first speak."""


@contextmanager
def closed_doors(*, open_ports: Collection[int] = ()) -> Iterator[None]:
    """Close the door of every gloo group that is made meanwhile, on this rank.

    Args:
        open_ports: of sockets that go on listening, as that of a store, which ranks join later.
    """
    before = set(listening())
    yield
    if os.environ.get(_LAZY, "0").lower() not in {"0", "", "false", "off", "no"}:
        log.info("%s is set: process groups go on listening for connections", _LAZY)
        return
    for inode, (descriptor, port) in listening().items():
        if inode not in before and port not in open_ports:
            _close_door(descriptor, port)


def listening() -> dict[int, tuple[int, int]]:
    """Descriptor and port of every TCP socket of this process that listens, by inode; nothing where that is not told."""
    if sys.platform != "linux":
        return {}
    found: dict[int, tuple[int, int]] = {}
    # Not from /proc/self/net/tcp: the kernel goes through the connections of the whole machine to write that.
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # closed meanwhile, as the one that lists them
            named = _SOCKET.fullmatch(str(entry.readlink()))
            if named is None:
                continue
            each = socket.socket(fileno=int(entry.name))
            try:
                internet = each.family in {socket.AF_INET, socket.AF_INET6} and each.type == socket.SOCK_STREAM
                if internet and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[int(named[1])] = (int(entry.name), each.getsockname()[1])
            finally:
                each.detach()  # it stays its owner's; a copy would keep the door open in a child that is forked meanwhile
    return found


def _close_door(descriptor: int, port: int) -> None:
    program = ctypes.create_string_buffer(_DROP_ALL)
    try:
        with socket.socket(fileno=os.dup(descriptor)) as door:
            door.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
    except OSError as error:
        log.info("port %d goes on listening after its process group is whole: %s", port, error)
