"""Records cut by box and sent to the ranks that want them, in threads with queues between them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moe_ckpt.errors import IdentityMismatch
from lightning_moe_ckpt.recovery._cut import HeldRecord, by_tensor, deliver, expect_all, moves
from lightning_moe_ckpt.storage import RecordEntry

Queues = dict[tuple[int, int], "SimpleQueue[bytes]"]


class Threads:
    """Transport between threads of one process."""

    def __init__(self, rank: int, world_size: int, queues: Queues) -> None:
        self.rank, self.world_size, self._queues = rank, world_size, queues

    def gather_values(self, value: object) -> list[Any]:
        raise NotImplementedError

    def gather_distinct(self, value: object) -> list[Any]:
        raise NotImplementedError

    def sum(self, own: Tensor) -> Tensor:
        raise NotImplementedError

    def route(self, messages: Sequence[tuple[int, object]]) -> list[tuple[int, Any]]:
        raise NotImplementedError

    def transfer(
        self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]
    ) -> Callable[[], None]:
        for to, view in sends:
            self._queues[self.rank, to].put(bytes(view))

        def wait() -> None:
            for of, view in receives:
                view[:] = self._queues[of, self.rank].get(timeout=20)

        return wait


def record(shape: tuple[int, ...], start: int, numel: int, **facts: Any) -> RecordEntry:
    given = {"operator": "block", "fqn": "weight", "state_key": "param", "box": None, **facts}
    return RecordEntry(
        name=f"full/{given['fqn']}/{start}+{numel}/param",
        kind="full",
        dtype="F32",
        global_shape=shape,
        global_start=start,
        numel=numel,
        offset=0,
        nbytes=4 * numel,
        digest="",
        **given,
    )


def cut(shape: tuple[int, ...], number: int, draw: random.Random) -> list[RecordEntry]:
    """Cut a tensor into flat intervals, or into boxes of columns of which some are cut again."""
    total = math.prod(shape)
    if draw.random() < 0.5 or len(shape) == 1:
        cuts = [0, *sorted(draw.randrange(total + 1) for _ in range(number - 1)), total]
        return [record(shape, a, b - a) for a, b in pairwise(cuts)]
    cuts = [0, *sorted(draw.randrange(shape[1] + 1) for _ in range(number - 1)), shape[1]]
    found: list[RecordEntry] = []
    for a, b in pairwise(cuts):
        size = (shape[0], b - a, *shape[2:])
        half = draw.randrange(math.prod(size) + 1)
        box = ((0, a, *([0] * len(shape[2:]))), size)
        found += [record(shape, 0, half, box=box), record(shape, half, math.prod(size) - half, box=box)]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_what_some_ranks_have_in_any_cut_others_get_in_theirs(seed: int) -> None:
    draw = random.Random(seed)
    num_ranks = draw.randrange(1, 5)
    shape = tuple(draw.randrange(1, 9) for _ in range(draw.randrange(1, 4)))
    whole = torch.arange(math.prod(shape), dtype=torch.float32) + 1

    def bytes_of(of: RecordEntry) -> Tensor:
        found = [whole.view(shape)[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))] for box in of.boxes()]
        return torch.cat([*(each.reshape(-1) for each in found), whole[:0]]).view(torch.uint8).clone()

    def held(records: list[RecordEntry]) -> tuple[list[HeldRecord], list[list[Tensor]]]:
        buffers: list[list[Tensor]] = [[] for _ in range(num_ranks)]
        pieces = []
        for each in records:
            rank = draw.randrange(num_ranks)
            pieces.append(HeldRecord.of(each, rank, 0, 0, place=len(buffers[rank])))
            buffers[rank].append(bytes_of(each))
        return pieces, buffers

    read, have = held(cut(shape, draw.randrange(1, 5), draw))
    wanted, expected = held(cut(shape, draw.randrange(1, 5), draw))
    got = [[torch.zeros_like(each) for each in own] for own in expected]
    sources, targets = by_tensor(read, wanted)
    queues: Queues = {(a, b): SimpleQueue() for a in range(num_ranks) for b in range(num_ranks)}

    def run(rank: int) -> None:
        expect_all(rank, targets, sources)
        transport = Threads(rank, num_ranks, queues)
        deliver(transport, moves(sources, targets, {}, rank), have[rank], got[rank], message_nbytes=16)

    with ThreadPoolExecutor(num_ranks) as pool:
        list(pool.map(run, range(num_ranks)))
    assert all(map(torch.equal, sum(got, []), sum(expected, [])))  # noqa: RUF017  # short


def test_an_element_that_nobody_has_is_named() -> None:
    sources, targets = by_tensor(
        [HeldRecord.of(record((6,), 0, 5), 0, 0, 0)], [HeldRecord.of(record((6,), 3, 3), 0, 0, 0)]
    )
    with pytest.raises(IdentityMismatch, match="of the 3 elements of its param that this rank has, 2 are stored"):
        expect_all(0, targets, sources)


def test_experts_that_ranks_number_from_zero_are_told_apart() -> None:
    """Two tensors of each, whose names differ in a number too."""

    def expert(number: int, local: int, layer: int, rank: int) -> HeldRecord:
        facts = {"operator": f"net.0.moe/expert.{number}", "fqn": f"net.0.moe.experts.{local}.{layer}.weight"}
        return HeldRecord.of(record((4,), 0, 4, **facts), rank, 0, rank)

    layers = (0, 2)
    read = [expert(number, number % 2, layer, number // 2) for number in range(4) for layer in layers]
    wanted = [expert(number, number, layer, 0) for number in range(4) for layer in layers]
    sources, targets = by_tensor(read, wanted)
    expect_all(0, targets, sources)
    for key, (target,) in targets.items():
        (source,) = sources[key]
        assert source.record.operator == target.record.operator
        assert source.record.fqn.rpartition(".")[0][-1] == target.record.fqn.rpartition(".")[0][-1]
