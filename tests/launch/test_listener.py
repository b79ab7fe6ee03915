"""Rank 0's store is found as soon as it listens."""

from __future__ import annotations

import socket
import threading

from lightning_moe_ckpt.launch._network import await_listener
from lightning_moe_ckpt.testing._attempts import free_port


def test_a_port_is_awaited_until_somebody_listens() -> None:
    """It listens only after the first attempt was refused."""
    port, met = free_port(), threading.Event()

    def wait() -> None:
        await_listener("127.0.0.1", port, 60.0)
        met.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not met.wait(0.05)
    with socket.create_server(("127.0.0.1", port)) as server:
        server.accept()[0].close()
        assert met.wait(60.0)
    waiting.join()


def test_nobody_is_awaited_for_ever() -> None:
    await_listener("127.0.0.1", free_port(), 0.02)
