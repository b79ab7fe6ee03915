"""Runs that nobody wrote: documents changed and sealed again, so that every digest in them is right."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_moe_ckpt.storage import digest_of

Change = Callable[[Any], object]
"""Changes JSON values in place."""

_HEAD = len('{"digest":"') + 32 + len('","document":')


def sealed(document: object) -> bytes:
    """A document with the digest of its bytes, whatever it says."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return sealed_text(text)


def sealed_text(text: bytes) -> bytes:
    """The same of text, which need not be JSON."""
    return b'{"digest":"%s","document":%s}\n' % (digest_of(text).encode(), text)


def opened(data: bytes) -> Any:
    """What a document says, without its digest."""
    return json.loads(data[_HEAD:-2])


class Forged:
    """A copy of a run of one rank, of which the newest generation is changed.

    Args:
        root: its folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commit = max(root.glob("snap/*/*/_COMMITTED"))
        self.marker = self.commit.with_name("rank00000.done")
        self.segment = next(self.commit.parent.glob("*.safetensors"))
        self.log = max((root / "_log").iterdir())

    def change_log(self, change: Change) -> Path:
        """The newest entry of the log."""
        document = opened(self.log.read_bytes())
        change(document["body"])
        self.log.write_bytes(sealed(document))
        return self.log

    def change_commit(self, change: Change) -> Path:
        """The manifest."""
        document = opened(self.commit.read_bytes())
        change(document["body"])
        self.commit.write_bytes(sealed(document))
        return self.commit

    def change_marker(self, change: Change, *, records: Change = lambda _: None, line: bytes | None = None) -> Path:
        """The marker, and the records of its segment; the manifest vouches for it again.

        Args:
            change: of the document.
            records: of the line of records, as JSON.
            line: instead of that line.
        """
        document, *lines = self.marker.read_bytes().splitlines(keepends=True)
        marker = opened(document)
        parsed = json.loads(lines[0])
        records(parsed)
        lines[0] = line if line is not None else json.dumps(parsed, separators=(",", ":")).encode() + b"\n"
        body = marker["body"]
        body["segments"][0]["records"] = {"nbytes": len(lines[0]), "digest": digest_of(lines[0])}
        change(body)
        self.put_marker(sealed(marker) + b"".join(lines))
        return self.marker

    def put_marker(self, data: bytes) -> Path:
        """Bytes in the place of the marker, for which the manifest vouches."""
        self.marker.write_bytes(data)
        self.change_commit(lambda body: body.update(markers=[digest_of(data)]))
        return self.marker

    def change_module(self, line: bytes) -> Path:
        """What the marker says of the module."""
        document, *lines = self.marker.read_bytes().splitlines(keepends=True)
        marker = opened(document)
        marker["body"]["module"] = {"nbytes": len(line), "digest": digest_of(line)}
        self.put_marker(sealed(marker) + b"".join(lines[:-1]) + line)
        return self.marker

    def change_plan(self, change: Change) -> Path:
        """The plan, in marker and manifest."""

        def of(body: Any) -> None:
            plan = json.loads(body["policy"]["plan"])
            change(plan)
            body["policy"]["plan"] = json.dumps(plan)

        self.change_policy(of)
        return self.commit

    def change_policy(self, change: Change) -> Path:
        """Body of marker and manifest alike."""
        self.change_marker(change)
        self.change_commit(change)
        return self.commit

    def put_segment(self, data: bytes) -> Path:
        """Other bytes of the segment: every digest follows."""
        self.segment.write_bytes(data)

        def digests(line: Any) -> None:
            line["digests"] = [digest_of(data[row[-3] : row[-3] + row[-2]]) for row in line["rows"]]

        def file(body: Any) -> None:
            body["segments"][0].update(nbytes=len(data), digest=digest_of(data))

        self.change_marker(file, records=digests)
        self.change_commit(lambda body: body.update(nbytes=len(data)))
        return self.segment

    def put_journal(self, journal: bytes) -> Path:
        """Bytes at the beginning of the journal's record, as far as they fit."""
        data = bytearray(self.segment.read_bytes())
        rows = json.loads(self.marker.read_bytes().splitlines()[1])["rows"]
        offset, nbytes = next((row[-3], row[-2]) for row in rows if row[0] == "journal")
        journal = struct.pack("<Q", len(journal)) + journal
        assert len(journal) <= nbytes, f"the journal has room for {nbytes}"
        data[offset : offset + len(journal)] = journal
        self.put_segment(bytes(data))
        return self.segment
