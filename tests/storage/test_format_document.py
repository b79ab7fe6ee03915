"""The example in `FORMAT.md` is what the code writes, and what it reads."""

from __future__ import annotations

import importlib.resources
import json
import re
import struct

import pytest

from lightning_moe_ckpt.storage import FsspecBackend, GenerationId, RunStore, digest_of, verify_records

SEGMENT = "snap/000000000000/e000001/rank00000.000000000000.safetensors"


@pytest.fixture(scope="module")
def example() -> list[str]:
    """Every line of JSON in the example, in order: header, marker of three lines, manifest, two log entries."""
    text = (importlib.resources.files("lightning_moe_ckpt") / "FORMAT.md").read_text()
    blocks = re.findall(r"```json\n(.*?)```", text.partition("## 8. Example")[2], flags=re.DOTALL)
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
