"""Storage of many ranks: every request is counted, and takes 20 ms of a simulated clock.

A bucket as S3 has it: a listing has pages of 1,000 keys and ends with a request for an empty one, a deletion takes up to
1,000 keys. All ranks store four generations of a few segments each, two of which are kept. What is measured is the last
one: commit, deletes, then the start of another incarnation, and what a rank reads to restore its part.
"""

from __future__ import annotations

import time
import tracemalloc
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import ceil

from typing_extensions import Self

from benchmarks.ranks import RanksFigure
from lightning_moe_ckpt.errors import Corrupt, KeyExists, KeyMissing
from lightning_moe_ckpt.storage import (
    Commit,
    Entry,
    RankMarker,
    RecordEntry,
    Retention,
    RunStore,
    SegmentEntry,
    _commit,
    digest_of,
)
from lightning_moe_ckpt.tiers import ObjectTier

REQUEST_SECONDS = 0.02
PAGE = 1000
_LONG = timedelta(minutes=10)
_SAMPLED = 5
"""Ranks of which requests are counted one by one."""


class Bucket:
    """Objects of all clients."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self._keys: list[str] | None = []

    @property
    def keys(self) -> list[str]:
        """Sorted keys."""
        if self._keys is None:
            self._keys = sorted(self.objects)
        return self._keys

    def put(self, key: str, data: bytes) -> None:
        if key not in self.objects:
            self._keys = None
        self.objects[key] = data

    def delete(self, key: str) -> None:
        if self.objects.pop(key, None) is not None:
            self._keys = None


class Client:
    """One process's backend over a bucket; requests take time of its own clock, one after another."""

    url = "s3://ranks/run"
    creates_exclusively = True

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.requests: Counter[str] = Counter()
        self.nbytes = 0
        """Bytes of objects that were read or written; a listed key has 200."""
        self.after_list: Callable[[], object] | None = None
        """Called once, behind the next listing."""

    @property
    def seconds(self) -> float:
        """Time of all requests."""
        return self.requests.total() * REQUEST_SECONDS

    def put(self, key: str, *views: bytes | memoryview) -> None:
        data = b"".join(views)
        self._count("put", len(data))
        self.bucket.put(key, data)

    def create(self, key: str, data: bytes) -> None:
        self._count("create", len(data))
        if key in self.bucket.objects:
            raise KeyExists(key)
        self.bucket.put(key, data)

    def get(self, key: str) -> bytes:
        data = self._read(key)
        self._count("get", len(data))
        return data

    def get_into(self, key: str, out: memoryview) -> None:
        self.get_range(key, 0, out)

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        self._count("get", out.nbytes)
        data = self._read(key)[start : start + out.nbytes]
        if len(data) != out.nbytes:
            raise Corrupt(key)
        out[:] = data

    def list(self, prefix: str, after: str = "", most: int | None = None) -> list[Entry]:
        keys = self.bucket.keys
        first = max(bisect_right(keys, after), bisect_left(keys, prefix))
        found = keys[first : bisect_left(keys, f"{prefix}\U0010ffff", first)][:most]
        self._count("list", 200 * len(found), ceil(len(found) / PAGE) + (len(found) != most))
        hook, self.after_list = self.after_list, None
        if hook is not None:
            hook()
        return [Entry(key, len(self.bucket.objects[key])) for key in found]

    def delete(self, *keys: str) -> None:
        self._count("delete", 0, ceil(len(keys) / PAGE))
        for key in keys:
            self.bucket.delete(key)

    def unfinished_writes(self, prefix: str) -> Sequence[Entry]:
        return []

    def sweep(self, prefix: str) -> None:
        self._count("list", 0)

    def close(self) -> None:
        """Nothing is open."""

    def _read(self, key: str) -> bytes:
        try:
            return self.bucket.objects[key]
        except KeyError:
            raise KeyMissing(key) from None

    def _count(self, verb: str, nbytes: int, number: int = 1) -> None:
        self.requests[verb] += number
        self.nbytes += nbytes


class Meter:
    """Requests and seconds of a client within a block; `seconds` has the CPU time too."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __enter__(self) -> Self:
        self._requests, self._nbytes, self._cpu = (
            self._client.requests.total(),
            self._client.nbytes,
            time.process_time(),
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu = time.process_time() - self._cpu
        self.requests = self._client.requests.total() - self._requests
        self.nbytes = self._client.nbytes - self._nbytes
        self.seconds = self.requests * REQUEST_SECONDS + self.cpu


class ManyRanks:
    """A job of many ranks in one process, and what it costs each.

    Args:
        num_ranks: their number.
        window: segments of a rank and generation.
    """

    def __init__(self, num_ranks: int, window: int) -> None:
        self.num_ranks, self.window, self.bucket = num_ranks, window, Bucket()
        self.first = Client(self.bucket)
        """Client of the coordinator."""
        self.store = RunStore.open(self.first, resume="auto")
        self.begin()

    def begin(self) -> list[Commit]:
        """Begin an incarnation from the newest generation, and return what it was offered."""
        self.store.promote()
        offered = self.store.candidates()
        assert self.store.open_incarnation(offered[0].generation if offered else None) is not None
        return offered

    def write(self, step: int, rank: int, client: Client) -> RankMarker:
        """Store a rank's part."""
        store, generation = RunStore.join(client, run_id=self.store.run_id), self.store.name(step)
        content = b"%8d" % rank * 8
        record = RecordEntry(
            name=f"full/w/{rank}+16/param", operator="experts", kind="full", fqn="w", state_key="param", dtype="F32",
            global_shape=(16 * self.num_ranks,), global_start=16 * rank, numel=16, offset=0, nbytes=64,
            digest=digest_of(content),
        )  # fmt: skip
        segments = [
            SegmentEntry(
                step=each,
                key=store.put_segment(generation, rank, each, memoryview(content)),
                nbytes=len(content),
                digest=record.digest,
                records=(record,),
            )
            for each in range(step - self.window + 1, step + 1)
        ]
        marker = RankMarker(
            run_id=self.store.run_id, rank=rank, world_size=self.num_ranks, generation=generation, plan_hash="plan",
            segments=tuple(segments), policy={"plan": '{"steps":[]}'},
            lineage=self.store.lineage if rank == 0 else None,
        )  # fmt: skip
        store.put_marker(marker)
        return marker

    def save(self, step: int, late: int = 0) -> tuple[Meter, Meter, int]:
        """Store a generation; `late` is the last rank, and is done while the coordinator looks for the first time.

        Returns:
            Costs of the commit and of what follows it, and the most requests of any other rank, its segments left out.
        """
        most = 0
        for rank in set(range(1, self.num_ranks)) - {late}:
            client = Client(self.bucket)
            self.write(step, rank, client)
            most = max(most, client.requests.total() - self.window)
        own = self.write(step, 0, self.first)
        if late:
            self.first.after_list = lambda: self.write(step, late, Client(self.bucket))
        with Meter(self.first) as committed:
            self.store.commit(own, timeout=_LONG)
        with Meter(self.first) as retained:
            self.store.retain(Retention(last=2))
        return committed, retained, most


def figures(num_ranks: int, window: int = 4) -> list[RanksFigure]:
    """Measure a job of so many ranks."""
    job = ManyRanks(num_ranks, window)
    for step in (10, 20, 30):
        job.save(step)
    before = job.first.requests.total()
    committed, retained, most = job.save(40, late=num_ranks - 1)
    of_first = job.first.requests.total() - before - window
    # The coordinator may just have looked when the last receipt appears.
    pause = max(_commit.LONGEST_PAUSE_SECONDS, num_ranks / _commit.RANKS_PER_SECOND)
    tracemalloc.start()
    job.save(50)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    with Meter(job.first) as started:
        job.store = RunStore.open(job.first, resume="auto")
        offered = job.begin()
    own = [_restored(job, offered, rank) for rank in range(0, num_ranks, max(num_ranks // _SAMPLED, 1))]
    total = of_first + most * (num_ranks - 1)
    rows = [
        ("commit, behind the last marker", "s", committed.seconds + pause, 5.0),
        ("its CPU", "s", committed.cpu, None),
        ("deletes and log", "s", retained.seconds, 30.0),
        ("requests of rank 0 per generation", "", of_first, None),
        ("requests of every other rank", "", most, 6.0),
        ("requests per rank, mean", "", total / num_ranks, 6.0),
        ("bytes of rank 0 per generation", "MB", (committed.nbytes + retained.nbytes) / 1e6, None),
        ("memory of rank 0", "MB", peak / 1e6, 1000.0),
        ("start of rank 0", "s", started.seconds, 5.0),
        ("its requests", "", started.requests, None),
        ("requests of a rank to restore", "", max(each.requests for each in own) - window, 6.0),
        ("may memory go: requests of a rank", "", _asked(job), None),
    ]
    return [
        RanksFigure(part="store", what=what, num_ranks=num_ranks, value=value, unit=unit, most=goal)
        for what, unit, value, goal in rows
    ]


def _restored(job: ManyRanks, offered: Sequence[Commit], rank: int) -> Meter:
    """Read a rank's part of the newest generation, as a restore does that finds nothing in memory."""
    client = Client(job.bucket)
    tier = ObjectTier(RunStore.join(client, run_id=job.store.run_id), offered)
    with Meter(client) as meter:
        (holding,) = (
            each for each in tier.holdings() if (each.generation, each.owner) == (offered[0].generation, rank)
        )
        for entry in tier.read_marker(holding).segments:
            out = memoryview(bytearray(entry.nbytes))
            tier.read_into(holding, entry, 0, out)
            assert digest_of(out) == entry.digest
    return meter


def _asked(job: ManyRanks) -> int:
    client = Client(job.bucket)
    with Meter(client) as meter:
        RunStore.join(client, run_id=job.store.run_id).may_need(job.store.name(60))
    return meter.requests
