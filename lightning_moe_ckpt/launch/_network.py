"""Connections between nodes: this node's address for others, and the end of connections that fall silent.

A cut cable resets no connection: a receiver waits for ever, and a sender for a quarter of an hour. So connections get limits of the
kernel: probes while nothing is sent (`SO_KEEPALIVE`), and `TCP_USER_TIMEOUT` for sent bytes. A stopped process still answers probes.

gloo and torch's rendezvous take the address of this node's host name. Where it is a loopback address, as Debian writes it into
`/etc/hosts`, or none, other nodes do not come through, and the address towards the first node takes its place.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the interface that gloo uses."""
_DESCRIPTORS = Path("/proc/self/fd")
_UNCONNECTED, _LISTENING, _GET_ADDRESS = 7, 10, 0x8915
"""States of a socket, as in the kernel's `tcp_states.h`, and `SIOCGIFADDR`."""
_LOOK_SECONDS = 0.005
_PROBES = 3
"""Number of probes in the time of silence, whose end is `TCP_USER_TIMEOUT` for probes, too."""


def tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield (inode, duplicate) of every TCP socket; the duplicate is closed when the next one is asked for."""
    if sys.platform != "linux":
        return
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # closed meanwhile, such as the descriptor of this listing
            # A duplicate cannot become another file between the look at its inode and what is done to it.
            duplicate = os.dup(int(entry.name))
            status = os.fstat(duplicate)
            if not stat.S_ISSOCK(status.st_mode):
                os.close(duplicate)
                continue
            with socket.socket(fileno=duplicate) as each:
                if each.family in {socket.AF_INET, socket.AF_INET6} and each.type == socket.SOCK_STREAM:
                    yield status.st_ino, each


def is_connected(each: socket.socket) -> bool:
    """Return whether a socket is connected, or about to be."""
    return each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] not in {_UNCONNECTED, _LISTENING}


def limit_silence(seconds: float, *, but: Collection[int] = ()) -> None:
    """End TCP connections of this process once the other side's kernel is silent for so long; not those of the inodes `but`."""
    pause, tcp = max(1, int(seconds / _PROBES)), socket.IPPROTO_TCP
    for inode, each in tcp_sockets():
        if inode not in but and is_connected(each):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            each.setsockopt(tcp, socket.TCP_KEEPIDLE, pause)
            each.setsockopt(tcp, socket.TCP_KEEPINTVL, pause)
            each.setsockopt(tcp, socket.TCP_USER_TIMEOUT, int(1000 * seconds))


def await_listener(host: str, port: int, seconds: float) -> None:
    """Return once somebody listens there, or after so many seconds. torch's own second attempt comes half a second after the first."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        with suppress(OSError), socket.create_connection((host, port), timeout=left):
            return
        time.sleep(_LOOK_SECONDS)


def address_towards(host: str) -> tuple[str, str]:
    """Return this node's address, or two empty texts if it has none that other nodes could reach.

    The second value is an interface, if the way to `host` has to decide because the host name leads nowhere; else empty.
    """
    with suppress(OSError):
        own = str(socket.getaddrinfo(socket.gethostname().encode(), None, type=socket.SOCK_STREAM)[0][4][0])
        if not own.startswith("127.") and own != "::1":
            return own, ""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # nothing is sent
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if address_of_interface(name) == own and not own.startswith("127."):
                return own, name
    return "", ""


def address_of_interface(name: str) -> str:
    """Return the IPv4 address of an interface; empty if it has none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name[:15].encode()))[20:24])
    return ""


def choose_interface() -> None:
    """Let gloo use the interface towards `MASTER_ADDR`, if its own choice is one that other nodes cannot reach."""
    if INTERFACE not in os.environ and (name := address_towards(os.environ.get("MASTER_ADDR", ""))[1]):
        os.environ[INTERFACE] = name
