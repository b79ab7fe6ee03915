"""A store as torchrun's agent serves it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time only

FORK = multiprocessing.get_context("fork")


def serve_agent_store(reply: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reply.send(store.port)
    reply.recv()


@pytest.fixture
def agent_port() -> Iterator[int]:
    """Port of a store as torchrun's agent serves it, in a process of its own."""
    here, there = FORK.Pipe()
    agent = FORK.Process(target=serve_agent_store, args=(there,), daemon=True)
    agent.start()
    assert here.poll(30)
    yield here.recv()
    here.send("stop")
    agent.join(10)
