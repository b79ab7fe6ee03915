"""Lines of records read by the compiled part are those that JSON gives, and no line is read that JSON would refuse."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.native._library import cpu
from lightning_moe_ckpt.storage import Bounds, RecordEntry
from lightning_moe_ckpt.storage._entries import RecordColumns, RecordTable

pytestmark = pytest.mark.skipif(cpu() is None, reason="there is no compiled part")

BOXES: list[Bounds | None] = [None, ((0, 0), (2, 3)), ((1, 0), (2, 3))]


def records(count: int, seed: int = 0) -> list[RecordEntry]:
    rng, found = random.Random(seed), list[RecordEntry]()
    for index in range(count):
        numel = rng.choice([0, 1, 6])
        found.append(
            RecordEntry(
                name=f"full/p.{index}/0+{numel}/{rng.choice(['param', 'step'])}", operator=f"op.{index // 3}",
                kind=rng.choice(["full", "compute"]), fqn=f"p.{rng.randrange(4)}", state_key=rng.choice(["", "param"]),
                dtype=rng.choice(["F32", "BF16"]), global_shape=rng.choice([(4, 3), (12,)]), global_start=rng.randrange(6),
                numel=numel, offset=4096 + 64 * index, nbytes=0, digest=f"{rng.getrandbits(128):032x}", present=rng.random() < 0.9,
                box=rng.choice(BOXES) if seed % 2 else None,
            )
        )  # fmt: skip
    sized = [replace(each, nbytes=each.numel * (4 if each.dtype == "F32" else 2)) for each in found]
    return [each if each.box is None else replace(each, global_shape=(4, 3), global_start=0) for each in sized]


def read(line: bytes) -> RecordColumns | None:
    return RecordTable(line)._read()


def parsed(line: bytes) -> list[list[object]] | None:
    try:
        return [[*column] for column in RecordTable(line)._parsed()]
    except Corrupt:
        return None


@pytest.mark.parametrize("count", [0, 1, 2, 3, 64, 1000])
@pytest.mark.parametrize("seed", [0, 1])
def test_lines_are_read_as_json_says(count: int, seed: int) -> None:
    """Some with boxes; one by one, as a column and in part."""
    entries = records(count, seed)
    line = RecordTable.of(entries).line
    columns = read(line)
    assert columns is not None
    assert [[*column] for column in columns] == parsed(line)
    assert list(columns.entries()) == entries
    assert list(RecordTable(line)) == entries
    for column in columns:
        assert [column[index] for index in range(count)] == [*column]
        assert [*column[1:3]] == [*column][1:3]
    assert columns.by_offset() is columns


def test_whatever_is_read_is_what_json_gives() -> None:
    """Of lines with bytes changed, put in, left out or moved, and of all that end early."""
    rng, number = random.Random(1), 0
    line = RecordTable.of(records(5, 1)).line
    pieces = [
        b'"',
        b",",
        b"[",
        b"]",
        b"}",
        b"\\",
        b"0",
        b"-",
        b"9" * 20,
        b"1.5",
        b" ",
        b"\n",
        b"true",
        b"null",
        b"\xff",
        b"\0",
    ]
    spoilt = [line[:stop] for stop in range(len(line))]
    for _ in range(4000):
        start = rng.randrange(len(line))
        stop = start + rng.choice([0, 0, 1, 1, rng.randrange(40)])
        middle = rng.choice([rng.choice(pieces), bytes([rng.randrange(256)]), line[stop : 2 * stop - start]])
        spoilt.append(line[:start] + middle + line[stop:])
    for each in spoilt:
        columns = read(each)
        if columns is not None:
            number += 1
            assert [[*column] for column in columns] == parsed(each), each
    assert 0 < number < len(spoilt) // 2


def test_lines_spelled_otherwise_are_parsed_as_json() -> None:
    """A name of another alphabet, the same name twice, records that are not in the order of the file."""
    first, second = records(2)
    others = [[replace(first, name="ü"), second], [first, replace(second, name=first.name)], [second, first]]
    for entries in others:
        line = RecordTable.of(entries).line
        assert read(line) is None
        assert list(RecordTable(line)) == entries


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "F7"}, "unknown type"),
        ({"nbytes": 5}, "has 5 bytes for"),
        ({"global_start": 2**59}, f"ends at element {2**59}"),
        ({"offset": 2**59, "numel": 0, "nbytes": 0}, f"ends at byte {2**59} of 9000"),
        ({"global_shape": (2**40, 2**40), "global_start": 2**58}, None),
    ],
)
def test_records_that_contradict_themselves_are_refused_as_ever(fields: dict[str, object], reason: str | None) -> None:
    first, second = records(2)
    table = RecordTable(RecordTable.of([first, replace(second, **{"numel": 0, "nbytes": 0, **fields})]).line)  # type: ignore[arg-type]
    assert table._read() is not None
    table.file_nbytes = 9000
    if reason is None:
        assert len(table) == 2
        return
    with pytest.raises(Corrupt, match=reason):
        list(table)
