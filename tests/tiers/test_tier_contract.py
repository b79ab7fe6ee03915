"""Host, peer and object tier keep one contract, each with its real medium: shared memory, gloo between ranks, storage."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch.distributed as dist
from door import PeerWorker, Replication
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported at run time only
from typing_extensions import override

from lightning_moe_ckpt.storage import Retention, RunStore, open_backend
from lightning_moe_ckpt.tiers import HostTier, HostWorker, Markers, ObjectTier, PersistWorker, RankMemory

from ._capture import TierHalves
from ._contract import TierContract
from ._nodes import Cluster, cluster
from ._segments import RUN

URL = "memory://contract"
HOLDERS = [1, 2]
MAX_SEGMENTS = 3


class TestHostTier(TierContract):
    """A ring in shared memory, which holds generations where they were captured."""

    @contextmanager
    @override
    def make_tier(self, tmp_path: Path) -> Iterator[TierHalves]:
        with cluster(tmp_path, [0]) as nodes:
            memory = RankMemory(RUN, 0, url=URL, directory=nodes.nodes[0])
            memory.claim(None)
            ring = memory.make(self.slot_nbytes, self.num_slots)
            worker = HostWorker(memory, Markers(run_id=RUN, rank=0, world_size=1))
            yield TierHalves(
                worker=worker,
                make_reader=lambda: HostTier(RUN, nodes.nodes[0]),
                lose=lambda: nodes.lose(0),
                ring=ring,
            )
            memory.close(unlink=True)


class TestPeerTier(TierContract):
    """Rank 0 of three sends to both others over gloo; what one of them holds is read."""

    @contextmanager
    @override
    def make_tier(self, tmp_path: Path) -> Iterator[TierHalves]:
        with cluster(tmp_path, [0, 1, 2]) as nodes:
            own, *holders = [_replication(group, nodes) for group in _groups(3)]
            for holder in holders:
                holder.allocate([[self.slot_nbytes] * MAX_SEGMENTS] * 3)
                holder.start()
            worker = PeerWorker(own, Markers(run_id=RUN, rank=0, world_size=3))
            worker._sizes = [self.slot_nbytes] * MAX_SEGMENTS
            worker._start_thread()  # as the first plan does
            yield TierHalves(
                worker=worker, make_reader=lambda: HostTier(RUN, nodes.nodes[1]), lose=lambda: nodes.lose(1)
            )
            for each in (own, *holders):
                each.close(5.0, unlink=True)


class TestObjectTier(TierContract):
    """A run's store and its commits, in a directory."""

    @contextmanager
    @override
    def make_tier(self, tmp_path: Path) -> Iterator[TierHalves]:
        with _stored(str(tmp_path / "run")) as tier:
            yield tier


class TestObjectTierInMemory(TierContract):
    """The same in a store that is no file system."""

    @contextmanager
    @override
    def make_tier(self, tmp_path: Path) -> Iterator[TierHalves]:
        with _stored(f"memory://{uuid.uuid4().hex}/run") as tier:
            yield tier


@contextmanager
def _stored(url: str) -> Iterator[TierHalves]:
    store = RunStore.open(open_backend(url), resume="auto")
    store.candidates()
    store.open_incarnation(None)
    others: list[RunStore] = []

    def make_reader() -> ObjectTier:
        others.append(RunStore.open(open_backend(url), resume="must"))
        return ObjectTier(others[-1], others[-1].candidates())

    def lose() -> None:
        backend = open_backend(url)
        for entry in backend.list("snap/"):
            backend.delete(entry.key)
        backend.close()

    yield TierHalves(
        worker=PersistWorker(store, Markers(run_id=store.run_id, rank=0, world_size=1), retention=Retention(last=4)),
        make_reader=make_reader,
        lose=lose,
        name=store.name,
    )
    for each in (store, *others):
        each.close()


def _groups(world_size: int) -> list[dist.ProcessGroup]:
    """gloo of all ranks, all of them in this process."""
    store = HashStore()

    def make(rank: int) -> dist.ProcessGroup:
        gloo = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=60))
        return cast(dist.ProcessGroup, gloo)  # has all of its point-to-point operations

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(make, range(world_size)))


def _replication(group: dist.ProcessGroup, nodes: Cluster) -> Replication:
    is_owner = group.rank() == 0
    return Replication(
        group,
        run_id=RUN,
        tag=RUN,
        url=URL,
        holders=HOLDERS if is_owner else [],
        owners=[] if is_owner else [0],
        max_chunk=5000,
        directory=nodes.shared_memory(group.rank()),
    )
