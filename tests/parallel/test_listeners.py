"""Strangers who connect to the ports of process groups get no answer and take nothing. Real sockets."""

from __future__ import annotations

import os
import resource
import selectors
import socket
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist
from launcher import run_world

from lightning_moe_ckpt.parallel import build_groups, closed_listeners
from lightning_moe_ckpt.parallel._gloo import listening

STRANGERS = 400
ROOM = 200
"""Descriptors that a process may open beyond those it has; gloo ends it when a connection more is to be accepted."""


def connected(ports: list[int], number: int) -> int:
    """How many of `number` strangers somebody answers within a moment; each says something that is no greeting."""
    with ExitStack() as stack, selectors.DefaultSelector() as waiting:
        for index in range(number):
            stranger = stack.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", ports[index % len(ports)]))
            waiting.register(stranger, selectors.EVENT_WRITE)
        answered = [key.fileobj for key, _ in waiting.select(0.5)]
        for each in answered:
            assert isinstance(each, socket.socket)
            each.send(b"GET / HTTP/1.1\r\n\r\n")
        return len(answered)


def descriptors() -> list[int]:
    return sorted(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208  # numbers


def limit(number: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def test_strangers_take_no_descriptor_and_do_not_disturb_the_ranks() -> None:
    """Four hundred connections to a rank that may open 200 descriptors; before its groups are whole, and after."""

    def work(rank: int) -> tuple[int, int, int]:
        default = {port for _, port in listening().values()}
        groups = build_groups()
        group = groups.groups["replicate"]
        own = torch.tensor([port for _, port in listening().values() if port not in default][:3])
        ports = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(ports, own, group=group)
        held, answered = descriptors(), 0
        limit(held[-1] + (ROOM if rank == 1 else 4 * STRANGERS))
        dist.barrier(group)
        if rank == 0:
            answered = connected(ports[1].tolist(), STRANGERS)
        dist.barrier(group)
        total = torch.ones(3)
        dist.all_reduce(total, group=groups.groups["control"])
        taken = len(descriptors()) - len(held)
        return answered, taken, int(total.sum())

    found = run_world(2, work, timeout=timedelta(seconds=60))
    assert found == [(0, 0, 6)] * 2, found


def test_only_what_began_to_listen_meanwhile_is_closed() -> None:
    """A socket of before, and one whose port is to stay open, answer."""
    with socket.create_server(("127.0.0.1", 0)) as before, ExitStack() as stack:
        made: list[socket.socket] = []
        stay = socket.create_server(("127.0.0.1", 0))
        kept = stay.getsockname()[1]
        stay.close()
        with closed_listeners(open_ports={kept}):
            made.append(stack.enter_context(socket.create_server(("127.0.0.1", 0))))
            made.append(stack.enter_context(socket.create_server(("127.0.0.1", kept))))
        assert connected([before.getsockname()[1]], 1) == 1
        assert connected([kept], 1) == 1
        assert connected([made[0].getsockname()[1]], 1) == 0
