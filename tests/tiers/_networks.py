"""Nodes with networks of their own: network namespaces, joined by one cable, where the machine allows them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_CLONE_NEWNET = 0x40000000
INTERFACE = "cable"


@contextmanager
def two_networks() -> Iterator[tuple[str, str]]:
    """Names of two namespaces that reach each other and nothing else; skips the test where they cannot be made."""
    word = uuid.uuid4().hex[:6]
    names = (f"moe-{word}-0", f"moe-{word}-1")
    made: list[str] = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        cable = ("link", "add", INTERFACE, "netns", names[0], "type", "veth", "peer", "name", INTERFACE)
        _ip(*cable, "netns", names[1])
        for index, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
        yield names
    finally:
        for name in made:
            _ip("netns", "del", name)


def enter(name: str) -> None:
    """This process sees the network of a namespace only, from here on."""
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")
    finally:
        os.close(descriptor)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("no network namespaces: there is no `ip` (iproute2)")
    except subprocess.CalledProcessError as refused:
        pytest.skip(f"no network namespaces: ip {' '.join(arguments)}: {refused.stderr.strip()}")
