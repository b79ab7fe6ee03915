"""More ranks than are all connected to each other: exchanges through a tree, real sockets, and ranks that die."""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from launcher import run_world

from lightning_moe_ckpt import coordination
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.parallel import GroupAbort, ParallelGroups, _gloo, _groups, build_groups
from lightning_moe_ckpt.parallel._gloo import MESH_RANKS
from lightning_moe_ckpt.parallel._groups import GroupName

LIMIT = timedelta(seconds=60)
CONTROL: list[Literal["control", "stage_control", "pipeline_control"]] = [
    "control",
    "stage_control",
    "pipeline_control",
]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # names


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks are many: ranks are forked, and see this."""
    for module in (_gloo, _groups, coordination):
        monkeypatch.setattr(module, "MESH_RANKS", 1)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (5, 1), (6, 2)])
def test_a_tree_gives_what_all_pairs_gave(size: int, num_stages: int) -> None:
    """Everything that ranks exchange, in all control groups."""

    def work(rank: int) -> bool:
        groups = build_groups(1, LIMIT, num_stages=num_stages)
        for name in CONTROL[: 1 if num_stages == 1 else 3]:
            exchange, ranks = Exchange(groups, name), groups.ranks(name)
            assert exchange.gather([rank, 7]) == [[each, 7] for each in ranks]
            assert exchange.gather_values({"is": "x" * 5000 * rank}) == [{"is": "x" * 5000 * each} for each in ranks]
            assert exchange.gather_distinct(rank // 2) == [*dict.fromkeys(each // 2 for each in ranks)]
            assert exchange.sum(torch.tensor([rank, 1])).tolist() == [sum(ranks), len(ranks)]
            assert exchange.broadcast(f"from {rank}") == f"from {ranks[0]}"
            assert exchange.all_agree(True)
            assert not exchange.all_agree(rank != ranks[-1])
            to = [(place, [rank, place]) for place in range(len(ranks)) if (place + rank) % 2]
            came = [(place, [each, exchange.rank]) for place, each in enumerate(ranks) if (exchange.rank + each) % 2]
            assert exchange.route(to) == came
            tensors = exchange.gather_tensor(torch.full((2, 2), float(rank)))
            assert torch.equal(torch.stack(tensors), torch.stack([torch.full((2, 2), float(each)) for each in ranks]))
            other = (exchange.rank + len(ranks) // 2) % len(ranks), (exchange.rank - len(ranks) // 2) % len(ranks)
            received = bytearray(3)
            exchange.transfer([(ranks[other[0]], memoryview(b"abc"))], [(ranks[other[1]], memoryview(received))])()
            assert received == b"abc"
        return True

    assert all(run_world(size, work))


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("lost", [0, 1, 4])
def test_a_rank_that_dies_ends_the_exchange_of_all(lost: int) -> None:
    """The root, a leaf, and one between: ranks that know it fail, and those that wait for these once they are gone."""

    def work(rank: int) -> float:
        exchange = Exchange(build_groups(1, LIMIT))
        exchange.all_agree(True)
        began = time.monotonic()
        if rank == lost:
            time.sleep(0.5)
        else:
            with pytest.raises(RuntimeError, match="gloo"):
                exchange.gather_values("x")
        _gloo._shut_down(_gloo._connected())  # as when a process ends
        time.sleep(0.5)
        return time.monotonic() - began

    assert max(run_world(6, work, timeout=timedelta(seconds=30))) < 10


@pytest.mark.usefixtures("few")
def test_ranks_that_wait_in_a_tree_can_be_aborted() -> None:
    """Rank 3 never comes, and lives; connections of the tree, and one made later, are broken."""

    def work(rank: int) -> float:
        with GroupAbort(4) as abort:
            groups = build_groups(1, LIMIT)
        exchange = Exchange(groups)
        exchange.all_agree(True)
        received = bytearray(1)
        peer = rank ^ 3  # no neighbours in the tree
        exchange.transfer([(peer, memoryview(b"x"))], [(peer, memoryview(received))])()
        if rank == 3:
            time.sleep(2.0)
            return 0.0
        threading.Timer(0.5, abort.abort).start()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="gloo"):
            (
                exchange.transfer([], [(peer, memoryview(received))])
                if rank == 0
                else lambda: exchange.sum(torch.ones(1, dtype=torch.int64))
            )()
        return time.monotonic() - began

    assert max(run_world(4, work, timeout=timedelta(seconds=30))) < 5


@pytest.mark.usefixtures("few")
def test_an_abort_ends_waiting_for_a_rank_that_never_connects() -> None:
    """Its process is stopped: whoever opens the connection. Each waits for each, so one of two listens for the other."""

    def work(rank: int) -> float:
        with GroupAbort(8) as abort:
            groups = build_groups(1, LIMIT)
        exchange, peer = Exchange(groups), rank ^ 3  # no neighbours in the tree
        exchange.all_agree(True)
        began = time.monotonic()
        for turn in range(2):  # one side of a pair, then the other: the first that is there waits for the second
            if (rank > peer) == turn:
                timer = threading.Timer(0.3, abort.abort)
                timer.start()
                with suppress(RuntimeError):  # in the wait, if the peer's kernel has answered for it
                    exchange.transfer([], [(peer, memoryview(bytearray(1)))])()
                    raise AssertionError("nothing was sent")
                timer.join()
                break
            time.sleep(2.0)
        taken = time.monotonic() - began
        abort.close(groups.groups.values())
        return taken

    assert max(run_world(8, work, timeout=timedelta(seconds=30))) < 6


@pytest.mark.usefixtures("few")
def test_a_value_may_have_the_limit_and_too_large_a_one_is_refused_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit is each rank's: all values travel together."""
    monkeypatch.setattr(coordination, "_MAX_VALUE_NBYTES", 2**12)

    def work(rank: int) -> None:
        exchange = Exchange(build_groups(1, LIMIT))
        values = [bytes([each]) * 1900 for each in range(exchange.world_size)]  # twice that, encoded
        assert exchange.gather_values(values[rank]) == values
        assert exchange.gather_distinct(values[rank]) == values
        assert exchange.route([(0, values[rank])]) == [*enumerate(values)][: None if rank == 0 else 0]
        large = bytes(3000 if rank == 4 else 1)
        refused: list[Callable[[], object]] = [
            lambda: exchange.gather_values(large),
            lambda: exchange.gather_distinct(large),
            lambda: exchange.route([(0, large)]),
            lambda: exchange.broadcast(bytes(3000)),
        ]
        for exchanged in refused:
            with pytest.raises(CheckpointError, match="more than 4096 bytes"):
                exchanged()
        assert exchange.gather([rank]) == [[each] for each in range(exchange.world_size)]

    run_world(6, work)


@pytest.mark.usefixtures("few")
def test_a_second_thread_is_refused() -> None:
    """Messages of two exchanges would be mixed up, and gloo ends the process."""

    def work(rank: int) -> None:
        exchange, other = Exchange(build_groups(1, LIMIT)), ThreadPoolExecutor(1)
        if rank == 0:
            first = other.submit(exchange.gather_values, rank)
            time.sleep(0.3)
            with pytest.raises(RuntimeError, match="two threads"):
                exchange.gather_values(rank)
            assert first.result() == [0, 1]
        else:
            time.sleep(1.0)
            exchange.gather_values(rank)
        assert exchange.all_agree(True)

    run_world(2, work)


@pytest.mark.soak
def test_descriptors_grow_with_the_logarithm_of_ranks() -> None:
    """Control groups of 16, 32 and 64 real processes, after exchanges among all: what each adds per doubling."""
    most: dict[int, int] = {}
    mean: dict[int, float] = {}
    for size in (16, 32, 64):

        def work(rank: int) -> int:
            groups = ParallelGroups.placed(rank, dist.get_world_size())
            before = descriptors()
            maker = _groups._Maker(groups, LIMIT)
            names: tuple[GroupName, ...] = "control", "replicate"
            for name in names:
                large = len(groups.ranks(name)) > MESH_RANKS
                groups.groups[name] = maker.large(name) if large else maker.own(name, "gloo")
            exchange = Exchange(groups)
            for _ in range(3):
                exchange.gather([rank])
                exchange.route([((rank + 1) % exchange.world_size, rank)])
                exchange.broadcast(rank)
            found = descriptors() - before
            exchange.all_agree(True)
            return found

        found = run_world(size, work, timeout=timedelta(seconds=200))
        most[size], mean[size] = max(found), statistics.mean(found)
    slope, fixed = statistics.linear_regression([math.log2(size) for size in most], [*most.values()])
    print(f"descriptors of two control groups: {most}, mean {mean}; {fixed:.1f} + {slope:.2f} log2 N")
    assert most[64] - most[16] <= 2 * 2
    assert mean[64] - mean[16] <= 1
