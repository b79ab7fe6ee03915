"""The examples and tables in `FORMAT.md` are what the code writes, and what it reads."""

from __future__ import annotations

import importlib.resources
import json
import re
import struct
import uuid
from collections import Counter, OrderedDict, defaultdict
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from stored._segments import read_record, read_segment, verify_records

from lightning_moe_ckpt.journal import decode, decode_journal, encode
from lightning_moe_ckpt.journal._codec import _READERS, LEAF_READERS
from lightning_moe_ckpt.operators import RecordKind
from lightning_moe_ckpt.snapshot import JOURNAL
from lightning_moe_ckpt.storage import GenerationId, RunStore, digest_of
from lightning_moe_ckpt.storage._fsspec import FsspecBackend

NONCE = "0a1b2c3d4e5f"
SEGMENT = f"snap/000000000000/i000001-{NONCE}/rank00000.000000000000.safetensors"


TEXT = (importlib.resources.files("lightning_moe_ckpt") / "FORMAT.md").read_text()
EXAMPLES = TEXT.partition("## 8. Example")[2].partition("\n## 9.")[0]
JOURNAL_TEXT = TEXT.partition("### 4.5 Journal")[2].partition("\n## ")[0]


def rows(text: str, first_cell: str) -> list[list[str]]:
    """Cells of the table whose header begins with `first_cell`, without header and rule."""
    table = text.partition(f"\n| {first_cell} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def code(cell: str) -> str:
    """What stands between the first two backticks."""
    return cell.split("`")[1]


WORDS = {
    "Counter": Counter,
    "OrderedDict": OrderedDict,
    "Path": Path,
    "defaultdict": defaultdict,
    "numpy": np,
    "timedelta": timedelta,
    "torch": torch,
}


def test_every_tag_of_the_journal_is_described() -> None:
    """A table of the codec's tags, none missing and none made up."""
    assert {code(row[0]) for row in rows(JOURNAL_TEXT, "tag")} == {*LEAF_READERS, *_READERS}


@pytest.mark.parametrize("row", rows(JOURNAL_TEXT, "tag"), ids=lambda row: code(row[0]))
def test_journal_values_are_written_as_the_table_says(row: list[str]) -> None:
    """The example of each tag, made by evaluating it, has the node beside it, and is read back from it."""
    value, node = eval(code(row[2]), WORDS), code(row[3])  # noqa: S307  # the text is in this repository
    data = encode(value)
    text_nbytes, arrays_nbytes = struct.unpack_from("<QQ", data)
    assert data[16 : 16 + text_nbytes].decode("ascii") == f"[1,{node}]"
    assert len(data) == 16 + text_nbytes + arrays_nbytes
    assert encode(decode(data)) == data
    assert type(decode(data)) is type(value)


def test_journal_of_the_example_is_read() -> None:
    """The bytes printed in the text, in a record with room to spare, are the value that the text says they are."""
    data = bytes.fromhex(JOURNAL_TEXT.partition("```text\n")[2].partition("```")[0])
    record = struct.pack("<Q", len(data)) + data + b"\xff" * 9
    journal = decode_journal(torch.frombuffer(bytearray(record), dtype=torch.uint8))
    assert list(journal) == ["a"]
    assert torch.equal(journal["a"], torch.tensor([1, 2], dtype=torch.int16))
    assert journal["a"].dtype == torch.int16
    assert int(re.findall(r"takes (\d+) bytes", JOURNAL_TEXT)[0]) == len(data)


def test_arrays_that_repeat_are_stored_once() -> None:
    """From 512 bytes on, as the text says, and with the position among all stored arrays."""
    large, small = torch.ones(512, dtype=torch.uint8), torch.ones(511, dtype=torch.uint8)
    once = b'[1,["l",["T","uint8",[511],"cpu"],["T","uint8",[511],"cpu"],["T","uint8",[512],"cpu"],'
    assert encode([small, small, large, large])[16:].startswith(once + b'["T","uint8",[512],"cpu",2]]]')


def test_every_kind_of_record_is_described() -> None:
    """What `RecordKind` lists, and what belongs to a rank rather than to an operator."""
    kinds = {name for row in rows(TEXT, "`kind`") for name in re.findall(r"`(\w+)`", row[0])}
    assert kinds == {*(kind.value for kind in RecordKind), JOURNAL, "buffer"}


@pytest.fixture(scope="module")
def example() -> list[str]:
    """Every line of JSON in the example, in order: header, marker of three lines, manifest, two log entries."""
    return json_lines(EXAMPLES.partition("### 8.1")[0])


@pytest.fixture(scope="module")
def borrowing() -> list[str]:
    """Every line of JSON in the example of a generation that references: header, marker of four lines, manifest."""
    return json_lines(EXAMPLES.partition("### 8.1")[2].partition("### 8.2")[0])


@pytest.fixture(scope="module")
def sparing() -> list[str]:
    """Every line of JSON in the example of a generation with a spare: marker of four lines, manifest."""
    return json_lines(EXAMPLES.partition("### 8.2")[2])


def json_lines(text: str) -> list[str]:
    blocks = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_a_store_made_of_the_example_is_read(example: list[str]) -> None:
    """Put together by hand from the text alone, then opened by the package."""
    backend, segment = example_run(example)
    store = RunStore.open(backend, resume="must")
    commits = store.candidates()
    assert [commit.generation for commit in commits] == [GenerationId(step=0, incarnation=1, nonce=NONCE)]
    read = store.read_marker(commits[0], 0)
    assert read.module is not None
    assert read.module.read().param_groups == (("blocks.0.moe.w1",),)
    stored = read.segments[0]
    out = bytearray(stored.nbytes)
    read_segment(store, stored, memoryview(out))
    verify_records(stored, memoryview(out))
    assert out == segment
    assert store.open_incarnation(commits[0].generation) == 2


def example_run(lines: list[str]) -> tuple[FsspecBackend, bytes]:
    """The run of the example, and its segment."""
    header, marker, records, module, manifest, *entries = lines
    segment = struct.pack("<Q", 4088) + header.encode().ljust(4088) + struct.pack("<3f", 1, 2, 3) + bytes(52 + 64)
    backend = FsspecBackend(f"memory://{uuid.uuid4().hex}/run")
    backend.put(SEGMENT, segment)
    backend.put(f"snap/000000000000/i000001-{NONCE}/rank00000.done", f"{marker}\n{records}\n{module}\n".encode())
    backend.put(f"snap/000000000000/i000001-{NONCE}/_COMMITTED", f"{manifest}\n".encode())
    for index, entry in enumerate(entries):
        backend.put(f"_log/{index:020d}.json", f"{entry}\n".encode())

    return backend, segment


def test_a_generation_that_borrows_is_read_as_the_text_says(example: list[str], borrowing: list[str]) -> None:
    """Beside the run of the first example: its own file, and the record that is in the other's."""
    backend, _ = example_run(example)
    header, marker, own, referenced, module, manifest = borrowing
    prefix = f"snap/000000000001/i000001-{NONCE}/"
    segment = struct.pack("<Q", 4088) + header.encode().ljust(4088) + bytes(64)
    backend.put(f"{prefix}rank00000.000000000001.safetensors", segment)
    backend.put(f"{prefix}rank00000.done", f"{marker}\n{own}\n{referenced}\n{module}\n".encode())
    backend.put(f"{prefix}_COMMITTED", f"{manifest}\n".encode())
    store = RunStore.open(backend, resume="must")
    newest, older = store.candidates()
    assert (newest.needs, older.needs) == ((older.generation,), ())
    read = store.read_marker(newest, 0)
    verify_records(read.segments[0], memoryview(segment))
    (entry,) = read.referenced
    out = bytearray(12)
    read_record(store, entry.segment, entry.segment.records[0], memoryview(out))
    assert struct.unpack("<3f", out) == (1, 2, 3)
    assert (read.to_bytes().decode(), newest.to_bytes().decode()) == (
        f"{marker}\n{own}\n{referenced}\n{module}\n",
        f"{manifest}\n",
    )


def test_a_generation_with_a_spare_is_read_as_the_text_says(example: list[str], sparing: list[str]) -> None:
    """Beside the run of the first example, which has the older copy of the operator that it stores."""
    backend, _ = example_run(example)
    marker, own, spare, module, manifest = sparing
    prefix = f"snap/000000000002/i000001-{NONCE}/"
    segment = struct.pack("<Q", 4088) + example[0].encode().ljust(4088) + struct.pack("<3f", 4, 5, 6) + bytes(52 + 64)
    backend.put(f"{prefix}rank00000.000000000002.safetensors", segment)
    backend.put(f"{prefix}rank00000.done", f"{marker}\n{own}\n{spare}\n{module}\n".encode())
    backend.put(f"{prefix}_COMMITTED", f"{manifest}\n".encode())
    store = RunStore.open(backend, resume="must")
    newest, older = store.candidates()
    assert (newest.needs, newest.spares) == ((), (older.generation,))
    read = store.read_marker(newest, 0)
    verify_records(read.segments[0], memoryview(segment))
    (entry,) = read.spares
    out = bytearray(12)
    read_record(store, entry.segment, entry.segment.records[0], memoryview(out))
    assert struct.unpack("<3f", out) == (1, 2, 3)
    assert (read.to_bytes().decode(), newest.to_bytes().decode()) == (
        f"{marker}\n{own}\n{spare}\n{module}\n",
        f"{manifest}\n",
    )


def test_every_key_of_a_marker_and_of_a_manifest_is_described(sparing: list[str]) -> None:
    """No document has more keys, or fewer."""
    marker, manifest = json.loads(sparing[0]), json.loads(sparing[4])
    for title, document in (("### 4.1 Marker", marker), ("### 4.2 Manifest", manifest)):
        section = TEXT.partition(title)[2].partition("\n### ")[0]
        described = {name for row in rows(section, "key") for name in re.findall(r"`(\w+)`", row[0])}
        assert described == {*document["document"]["body"]}
        assert TEXT.startswith(f"# Storage format, version {document['document']['version']}\n")


def test_digests_follow_the_text(example: list[str], borrowing: list[str]) -> None:
    """Computed as section 4 says, without the package's writer."""
    _, marker, records, module, *others = example
    _, second, own, referenced, again, manifest = borrowing
    body, body2 = (json.loads(line)["document"]["body"] for line in (marker, second))
    for told, line in (
        (body["segments"][0]["records"], records), (body["module"], module), (body2["module"], again),
        (body2["segments"][0]["records"], own), (body2["referenced"][0]["segment"]["records"], referenced),
    ):  # fmt: skip
        assert told == {"digest": digest_of(f"{line}\n".encode()), "nbytes": len(line) + 1}
    for line in (marker, *others, second, manifest):
        parsed = json.loads(line)
        text = json.dumps(parsed["document"], sort_keys=True, separators=(",", ":"))
        assert parsed["digest"] == digest_of(text.encode())
        assert line == f'{{"digest":"{parsed["digest"]}","document":{text}}}'
