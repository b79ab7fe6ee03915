"""A rank that says anything at all cannot make another one allocate, or wait, more than is its due. Real gloo sockets."""

from __future__ import annotations

import contextlib
import json
import logging
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import xxhash
from door import DeltaDecoder, NotReplicated, Pacer, Replication
from torch import Tensor

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage import GenerationId, SegmentLayout, TensorSpec
from lightning_moe_ckpt.tiers._peer_stream import ReplicaStream
from lightning_moe_ckpt.tiers._peer_wire import _MAGIC, _NUM_FIELDS, MessageKind, Wire, compress, decompress

from ._nodes import Cluster, Rank, cluster, run

RUN = "0123456789abcdef"
NBYTES = 100_000
MEMORY = 64 * 2**20
HUGE = 2**62

Header = tuple[int, ...]
"""The integers of a header, but for the first."""


class Begin(tuple[int, ...]):  # noqa: SLOT001  # no tuple has any
    """A header that announces a generation, and the sizes behind it."""

    sizes: Sequence[int]


def header(kind: int, *numbers: int, length: int | None = None) -> Header:
    return (kind, len(numbers) if length is None else length, *numbers)


def begin(num_segments: int = 2, slot_nbytes: int = NBYTES, is_link: int = 0, names: Header = (5, 0, 1)) -> Begin:
    made = Begin(header(MessageKind.BEGIN, *names, *[-1] * 6, num_segments, is_link))
    read_on = min(names) >= 0 and max(*names, num_segments) < 100 and is_link < 2
    made.sizes = [slot_nbytes] * num_segments if read_on else []
    return made


TALKS: dict[str, Sequence[Header]] = {
    "unknown kind": [header(99)],
    "too many numbers": [header(MessageKind.CLOSE, length=HUGE)],
    "too few numbers": [header(MessageKind.BEGIN, 1)],
    "begin without segments": [begin(num_segments=0)],
    "begin with less than nothing": [begin(slot_nbytes=-1)],
    "begin with more segments than any": [begin(num_segments=2**40)],
    "begin of no generation": [begin(names=(-1, -1, -1))],
    "begin of no incarnation": [begin(names=(5, 0, HUGE))],
    "begin of what is neither whole nor a difference": [begin(is_link=2)],
    "segment before begin": [header(MessageKind.SEGMENT, 4, NBYTES, 0, 0)],
    "segment larger than its slot": [begin(), header(MessageKind.SEGMENT, 4, HUGE, 0, 0)],
    "segment of less than nothing": [begin(), header(MessageKind.SEGMENT, 4, -8, 0, 0)],
    "segment of nothing": [begin(), header(MessageKind.SEGMENT, 4, 0, 0, 0)],
    "segment after one that is not whole": [
        begin(),
        header(MessageKind.SEGMENT, 4, 100, 0, 0),
        header(MessageKind.SEGMENT, 5, 100, 0, 0),
    ],
    "chunk larger than its segment": [
        begin(),
        header(MessageKind.SEGMENT, 4, 100, 0, 0),
        header(MessageKind.CHUNK, 0, HUGE),
    ],
    "chunk before its segment": [
        begin(),
        header(MessageKind.SEGMENT, 4, 100, 0, 0),
        header(MessageKind.CHUNK, -50, 100),
    ],
    "chunk of less than nothing": [
        begin(),
        header(MessageKind.SEGMENT, 4, 100, 0, 0),
        header(MessageKind.CHUNK, 50, -10),
    ],
    "mirror before begin": [header(MessageKind.MIRROR, 4, 8, 16)],
    "mirror larger than its slot": [begin(), header(MessageKind.MIRROR, 4, 8, HUGE)],
    "mirror of less than nothing": [begin(), header(MessageKind.MIRROR, 4, 16, 8)],
    "mirror of a whole segment": [begin(), header(MessageKind.MIRROR, 4, 0, 100)],
    "segment but for what was never filled": [begin(), header(MessageKind.SEGMENT, 4, 100, 8, 16)],
    "segment of less than its run": [begin(), header(MessageKind.SEGMENT, 4, 100, 8, HUGE)],
    "recipe larger than a segment": [begin(), header(MessageKind.DELTA, 4, HUGE, 0, 0)],
    "marker larger than any": [begin(), header(MessageKind.MARKER, HUGE, 0)],
    "marker told by a difference, larger than any": [begin(), header(MessageKind.MARKER, HUGE, 1)],
    "an answer": [header(MessageKind.WHOLE, 1, 2)],
}
REFUSED: dict[str, Header] = {
    "more memory than there is": begin(slot_nbytes=HUGE),
    "more segments than there is memory for": begin(num_segments=10, slot_nbytes=2**40),
    "a difference where there is no room for any": begin(num_segments=1, is_link=1),
}
"""What is answered by a refusal, after which the talk goes on."""


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[Cluster]:
    """On a node each."""
    with cluster(tmp_path, [0, 1]) as nodes:
        yield nodes


def say(group: dist.ProcessGroup, message: Header) -> None:
    """Send a header as a peer of another making would."""
    values = [_MAGIC, *message]
    group.send([torch.tensor(values + [0] * (_NUM_FIELDS - len(values)), dtype=torch.int64)], 1, 71).wait()
    if isinstance(message, Begin) and message.sizes:
        payload = torch.tensor(message.sizes, dtype=torch.int64).view(torch.uint8)
        with contextlib.suppress(RuntimeError):  # the holder may have gone by then
            group.send([payload], 1, 71).wait()


def used() -> int:
    """Memory of this process that is its own."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))


def holder(rank: Rank, group: dist.ProcessGroup) -> Replication:
    made = Replication(group, run_id=RUN, tag=RUN, holders=(), owners=[0], url="memory://peers")
    made.allocate([[NBYTES] * 2] * 2)
    made.start()
    return made


def test_whatever_an_owner_says_its_holder_makes_no_room_for_it_and_goes_on(two_ranks: Cluster) -> None:
    """One talk after the other: the holder's thread ends at once, and says why; nothing was allocated."""

    def work(rank: Rank) -> list[str]:
        wrong, group = [], rank.group()
        wire = Wire(group, 1, to_holder=True, max_chunk=2**20)
        for name, talk in {**TALKS, **{name: [each] for name, each in REFUSED.items()}}.items():
            if rank.rank == 0:
                for message in talk:
                    say(group, message)
                    if (
                        isinstance(message, Begin)
                        and (message, message.sizes) == (begin(), begin().sizes)
                        and (answer := wire.receive()).kind is not MessageKind.READY
                    ):
                        wrong.append(f"{name}: {answer}")
                if name in REFUSED:
                    answer = wire.receive()
                    said = wire.receive_bytes(answer.numbers[0], 2**16).decode()
                    assert "iB are free" in said or "no room here for differences" in said
                    say(group, header(MessageKind.CLOSE))
                rank.wait_for(f"ended {name}")
            else:
                before, made = used(), holder(rank, group)
                if not made.receivers[0].join(20):
                    wrong.append(f"{name}: the holder waits")
                if used() - before > MEMORY:
                    wrong.append(f"{name}: {used() - before} bytes")
                made.close(5, unlink=True)
                rank.tell(f"ended {name}")
        return wrong + [thread.name for thread in threading.enumerate() if "replica" in thread.name]

    assert run(two_ranks, work) == [[], []]


ANSWERS: dict[str, Sequence[Header]] = {
    "reason larger than any": [header(MessageKind.REFUSED, HUGE)],
    "reason without a length": [header(MessageKind.REFUSED)],
    "whole without a digest": [header(MessageKind.READY), header(MessageKind.WHOLE, 1)],
    "whole with half a drift": [header(MessageKind.READY), header(MessageKind.WHOLE, 1, 2, 3)],
    "ready with numbers": [header(MessageKind.READY, 1)],
}


def test_whatever_a_holder_answers_its_owner_leaves_it_out(
    two_ranks: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """A segment is then not replicated, which is an error of ours, and training goes on."""

    def work(rank: Rank) -> list[str]:
        wrong, group = [], rank.group()
        for name, talk in ANSWERS.items():
            if rank.rank == 0:
                before = used()
                stream = ReplicaStream(group, [1], max_chunk=2**20, pacer=Pacer())
                try:
                    stream.begin(
                        GenerationId(step=5, incarnation=0, nonce="0123456789ab"),
                        keep=None,
                        sizes=[NBYTES],
                    )
                    stream.finish(b"marker")
                    wrong.append(f"{name}: believed")
                except NotReplicated:
                    if used() - before > MEMORY:
                        wrong.append(f"{name}: {used() - before} bytes")
            else:
                wire = Wire(group, 0, to_holder=False, max_chunk=2**20)
                assert wire.receive().kind is MessageKind.BEGIN
                wire.receive_bytes(8, 8)
                for index, message in enumerate(talk):
                    if index:
                        wire.receive_bytes(wire.receive().numbers[0], 2**16)
                    values = [_MAGIC, *message]
                    group.send([torch.tensor(values + [0] * (_NUM_FIELDS - len(values)))], 0, 72).wait()
            dist.barrier()
        return wrong

    caplog.set_level(logging.CRITICAL)
    assert run(two_ranks, work) == [[], []]


def recipe(document: bytes, codes: bytes, header: bytes, like: bytes) -> bytes:
    """As the sending side packs it, whatever it says."""
    parts = [document, codes, compress(header, like)]
    body = struct.pack("<III", *map(len, parts)) + b"".join(parts)
    return body + xxhash.xxh3_128_digest(body)


def segment() -> Tensor:
    layout = SegmentLayout([TensorSpec("a/param", torch.float32, (8,))], metadata={})
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.write_header(memory)
    return memory


GOOD = {"settings": [], "dtype": "F32", "audit": False, "digest": None, "zeros": 0}
BOMB = b"a quarter of a gibibyte of zeros, which only the tests that inflate it deflate"


@pytest.mark.parametrize(
    ("document", "codes"),
    [
        (BOMB, zlib.compress(b"\0")),
        (zlib.compress(json.dumps(GOOD).encode()), BOMB),
        (zlib.compress(json.dumps(GOOD).encode()), b"no deflated bytes"),
        (zlib.compress(json.dumps(GOOD).encode()), zlib.compress(b"\0")[:-1]),
        (zlib.compress(b"[" * 10**5), zlib.compress(b"\0")),
        (zlib.compress(b"{}"), zlib.compress(b"\0")),
        (zlib.compress(b"[]"), zlib.compress(b"\0")),
        (zlib.compress(json.dumps({**GOOD, "settings": [{"lr": 1}]}).encode()), zlib.compress(b"\0")),
        (zlib.compress(json.dumps({**GOOD, "dtype": "I64"}).encode()), zlib.compress(b"\0")),
        (zlib.compress(json.dumps({**GOOD, "dtype": [1]}).encode()), zlib.compress(b"\0")),
        (zlib.compress(json.dumps({**GOOD, "audit": 1}).encode()), zlib.compress(b"\0")),
        (zlib.compress(json.dumps({**GOOD, "digest": 1}).encode()), zlib.compress(b"\0")),
        (zlib.compress(json.dumps(GOOD).encode()), zlib.compress(b"\0\0\0")),
        (zlib.compress(json.dumps(GOOD).encode()), zlib.compress(b"\3")),
    ],
    ids=lambda value: f"{len(value)}" if isinstance(value, bytes) else "",
)
def test_a_recipe_is_never_inflated_beyond_what_a_segment_takes(document: bytes, codes: bytes) -> None:
    """A quarter of a gibibyte of zeros in as many kibibytes, and documents of other kinds: refused as what does not fit."""
    document, codes = (zlib.compress(bytes(2**28), 9) if each is BOMB else each for each in (document, codes))
    base = segment()
    like = SegmentLayout.header_in(base.numpy().data)
    DeltaDecoder(recipe(zlib.compress(json.dumps(GOOD).encode()), zlib.compress(b"\0"), like, like), base, segment())
    before = used()
    with pytest.raises(Corrupt):
        DeltaDecoder(recipe(document, codes, like, like), base, segment())
    assert used() - before < MEMORY


def forged_lines(parts: Sequence[tuple[int, int, bytes]]) -> bytes:
    return b"".join(struct.pack("<BII", how, nbytes, len(told)) + told for how, nbytes, told in parts)


@pytest.mark.parametrize(
    "told",
    [
        lambda: forged_lines([(2, 2**28, zlib.compress(bytes(2**28), 9))]),
        lambda: forged_lines([(2, 2**20, zlib.compress(bytes(2**20), 9))] * 256),
        lambda: forged_lines([(0, 2**31, b"")]),
        lambda: forged_lines([(0, 0, b"")] * (2**20 + 2)),
    ],
    ids=["one line", "many lines", "a line that is not there", "empty lines"],
)
def test_what_is_told_by_a_difference_takes_no_more_than_was_allowed(told: Callable[[], bytes]) -> None:
    """However little tells how much: before it is made, not after."""
    data = told()
    before = used()
    with pytest.raises(Corrupt):
        decompress(data, b"a marker\nof two lines", 2**20)
    assert used() - before < MEMORY
    text = b"a marker\nof two Lines"
    assert decompress(compress(text, b"a marker\nof two lines"), b"a marker\nof two lines", len(text)) == text
