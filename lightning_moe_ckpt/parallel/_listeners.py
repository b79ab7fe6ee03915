"""Protect gloo's listening sockets: once a process group is complete, they drop all new connections.

gloo accepts connections as long as a group lives, and keeps those that never say which pair they belong to. When the
process runs out of descriptors, `accept` fails, and gloo ends the process (measured with torch 2.13: 250 silent
connections and a limit of 256). But all pairs of a group are connected when `new_group` returns, and never again. So
the sockets that began to listen meanwhile get a filter that drops every packet. A stranger's connection then takes no
descriptor, no memory and no thread; existing connections are not affected.

Socket filters exist on Linux only; elsewhere the sockets stay open.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_moe_ckpt._logging import rank_logger

log = rank_logger(__name__)

_DESCRIPTORS = Path("/proc/self/fd")
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""Program for the kernel's packet filter: return 0, which drops the packet."""
_LAZY = "TORCH_GLOO_LAZY_INIT"
"""Environment variable that makes gloo connect pairs on first use instead."""


@contextmanager
def closed_listeners(*, open_ports: Collection[int] = ()) -> Iterator[None]:
    """Close the listening sockets of every gloo group that is made in this context, on this rank.

    Args:
        open_ports: ports that stay open, such as that of a store, which ranks join later.
    """
    before = set(listening())
    yield
    if os.environ.get(_LAZY, "0").lower() not in {"0", "", "false", "off", "no"}:
        log.info("%s is set: process groups go on listening for connections", _LAZY)
        return
    for inode, (descriptor, port) in listening().items():
        if inode not in before and port not in open_ports:
            _drop_connections(descriptor, port)


def listening() -> dict[int, tuple[int, int]]:
    """Return (descriptor, port) of every listening TCP socket of this process, by inode; empty if unknown."""
    if sys.platform != "linux":
        return {}
    found: dict[int, tuple[int, int]] = {}
    # Not from /proc/self/net/tcp: the kernel goes through the connections of the whole machine to write that.
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # closed meanwhile, such as the descriptor of this listing
            named = _SOCKET.fullmatch(str(entry.readlink()))
            if named is None:
                continue
            each = socket.socket(fileno=int(entry.name))
            try:
                internet = each.family in {socket.AF_INET, socket.AF_INET6} and each.type == socket.SOCK_STREAM
                if internet and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[int(named[1])] = (int(entry.name), each.getsockname()[1])
            finally:
                each.detach()  # the owner closes it; a duplicate would stay open in a child that is forked meanwhile
    return found


def _drop_connections(descriptor: int, port: int) -> None:
    program = ctypes.create_string_buffer(_DROP_ALL)
    try:
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
    except OSError as error:
        log.info("port %d goes on listening after its process group is whole: %s", port, error)
