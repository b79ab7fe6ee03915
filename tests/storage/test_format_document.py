"""The examples and tables in `FORMAT.md` are what the code writes, and what it reads."""

from __future__ import annotations

import importlib.resources
import json
import re
import struct
from collections import Counter, OrderedDict, defaultdict
from datetime import timedelta
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_moe_ckpt.operators import RecordKind
from lightning_moe_ckpt.session import decode_journal
from lightning_moe_ckpt.session._codec import _READERS, decode, encode, register_enum
from lightning_moe_ckpt.session._codec_leaves import LEAF_READERS
from lightning_moe_ckpt.session._layout import JOURNAL
from lightning_moe_ckpt.storage import FsspecBackend, GenerationId, RunStore, digest_of, verify_records

SEGMENT = "snap/000000000000/e000001/rank00000.000000000000.safetensors"


TEXT = (importlib.resources.files("lightning_moe_ckpt") / "FORMAT.md").read_text()
JOURNAL_TEXT = TEXT.partition("### 4.5 Journal")[2].partition("\n## ")[0]


def rows(text: str, first_cell: str) -> list[list[str]]:
    """Cells of the table whose header begins with `first_cell`, without header and rule."""
    table = text.partition(f"\n| {first_cell} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def code(cell: str) -> str:
    """What stands between the first two backticks."""
    return cell.split("`")[1]


class Phase(str, Enum):
    FIT = "fit"


Phase.__module__ = "train"
register_enum(Phase)
WORDS = {
    "Counter": Counter,
    "OrderedDict": OrderedDict,
    "Path": Path,
    "Phase": Phase,
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
    blocks = re.findall(r"```json\n(.*?)```", TEXT.partition("## 8. Example")[2], flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_a_store_made_of_the_example_is_read(example: list[str]) -> None:
    """Put together by hand from the text alone, then opened by the package."""
    header, marker, records, module, manifest, *entries = example
    segment = struct.pack("<Q", 4088) + header.encode().ljust(4088) + struct.pack("<3f", 1, 2, 3) + bytes(52 + 64)
    backend = FsspecBackend("memory://format-example/run")
    backend.put(SEGMENT, segment)
    backend.put("snap/000000000000/e000001/rank00000.done", f"{marker}\n{records}\n{module}\n".encode())
    backend.put("snap/000000000000/e000001/_COMMITTED", f"{manifest}\n".encode())
    for index, entry in enumerate(entries):
        backend.put(f"_log/{index:020d}.json", f"{entry}\n".encode())

    store = RunStore.open(backend, resume="must")
    commits = store.candidates()
    assert [commit.generation for commit in commits] == [GenerationId(step=0, epoch=1)]
    read = store.read_marker(commits[0], 0)
    assert read.module is not None
    assert read.module.read().param_groups == (("blocks.0.moe.w1",),)
    stored = read.segments[0]
    out = bytearray(stored.nbytes)
    store.read_segment(stored, memoryview(out))
    verify_records(stored, memoryview(out))
    assert out == segment
    assert store.open_epoch(commits[0].generation) == 2


def test_digests_follow_the_text(example: list[str]) -> None:
    """Computed as section 4 says, without the package's writer."""
    _, marker, records, module, *others = example
    body = json.loads(marker)["document"]["body"]
    for told, line in ((body["segments"][0]["records"], records), (body["module"], module)):
        assert told == {"digest": digest_of(f"{line}\n".encode()), "nbytes": len(line) + 1}
    for line in (marker, *others):
        parsed = json.loads(line)
        text = json.dumps(parsed["document"], sort_keys=True, separators=(",", ":"))
        assert parsed["digest"] == digest_of(text.encode())
        assert line == f'{{"digest":"{parsed["digest"]}","document":{text}}}'
