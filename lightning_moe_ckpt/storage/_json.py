r"""Canonical JSON documents that carry the digest of their own bytes.

```text
{"digest":"<32 hex digits>","document":{"body":{...},"format":"lightning-moe-ckpt/<kind>","version":1}}\n
```

The digest covers the bytes of the value of `document`. Keys are sorted, no blanks, ASCII only, no NaN: one value has
one spelling. The reader encodes what it parsed and compares the bytes, so it also sees damage that JSON tolerates (a
letter's case in an escape, a blank, a repeated key).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TypeVar

import xxhash

from lightning_moe_ckpt.errors import Corrupt, StorageRefused
from lightning_moe_ckpt.storage._names import MAX_DOCUMENT_NBYTES

DIGEST_NAME = "xxh3-128"
"""Name of the digest in documents. It detects accidents (flips, truncation, mix-ups), not attackers.

xxhash releases the GIL and runs at memory speed, so a background thread may digest a segment while training goes on.
Measured: 10 GB/s on one core; crc32 3, sha256 0.4.
"""


def digest_of(view: bytes | memoryview) -> str:
    """Digest `view` without copying it.

    Args:
        view: C-contiguous bytes; the caller must not write to them meanwhile.

    Returns:
        32 lower-case hexadecimal digits.
    """
    return str(xxhash.xxh3_128_hexdigest(view))


VERSION = 1
"""Version of the document grammar."""
BORROWING = 2
"""Version of documents of generations that reference; others keep `VERSION`, which older releases can read."""
SPARING = 3
"""Version of documents that also name spares."""

OF_A_LIFE = 3
"""Added to the version if the generation names its incarnation, so that older releases refuse the document."""

T = TypeVar("T")

MAX_INTEGER = 2**63 - 1
"""Largest number in a document."""
_HEAD_NBYTES = len('{"digest":"') + 32 + len('","document":')


def encode(kind: str, body: Mapping[str, object], *, version: int | None = None) -> bytes:
    """Encode a document.

    Args:
        kind: what the document is: `log`, `marker` or `commit`.
        body: JSON values; keys must be strings, numbers finite.
        version: version of the keys; `VERSION` by default.

    Raises:
        ValueError: a number is not finite.
        TypeError: a value has no JSON form.
        StorageRefused: the document would be too large to be read back.
    """
    payload = _canonical({"body": body, "format": _format(kind), "version": VERSION if version is None else version})
    if len(payload) > MAX_DOCUMENT_NBYTES - 2**10:
        raise StorageRefused(
            f"a {kind} would have {len(payload)} bytes; {MAX_DOCUMENT_NBYTES} are read back. Keep fewer generations, or plan for "
            "fewer operators."
        )
    return _sealed(payload)


def decode(data: bytes, *, kind: str, where: str) -> Fields:
    """Decode and check a document of version `VERSION`.

    Args:
        data: all bytes of the object.
        kind: what the document must be.
        where: key or path, for messages.

    Raises:
        Corrupt: grammar, spelling, digest, kind or version is not as written by `encode`.
    """
    return decode_any(data, kind=kind, where=where, versions=(VERSION,))[1]


def decode_any(data: bytes, *, kind: str, where: str, versions: tuple[int, ...]) -> tuple[int, Fields]:
    """Decode a document of one of `versions`; return its version and body. Raises `Corrupt` like `decode`."""
    if len(data) > MAX_DOCUMENT_NBYTES:
        raise Corrupt(f"{where}: {len(data)} bytes are more than a document has. Another copy may be good.")
    payload = data[_HEAD_NBYTES:-2]
    if not data.startswith(b'{"digest":"') or not payload:
        raise Corrupt(f"{where}: not a document of this format. Another copy may be good.")
    if _sealed(payload) != data:
        raise Corrupt(f"{where}: its bytes do not match the digest they carry. Another copy may be good.")
    try:
        document = json.loads(payload.decode("ascii"))
        again = _canonical(document)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{where}: not a document of this format ({error}). Another copy may be good.") from error
    if again != payload:
        raise Corrupt(f"{where}: is not spelled as this format is. Another copy may be good.")
    fields = Fields(document, where)
    written, version = fields.text("format"), fields.integer("version")
    if written != _format(kind) or version not in versions:
        raise Corrupt(
            f"{where}: is {(written, version)}, expected {_format(kind)!r} of version {' or '.join(map(str, versions))}. "
            "Read it with the release that wrote it."
        )
    body = fields.mapping("body")
    fields.end()
    return version, body


def described_nbytes(head: bytes) -> int | None:
    """Return the size of a file that starts with a document, with the lines it names; `None` without a document."""
    end = head.find(b"\n") + 1
    payload = head[_HEAD_NBYTES : max(end - 2, 0)]
    if _sealed(payload) != head[:end]:
        return None
    nbytes = end

    def add(value: dict[str, object]) -> dict[str, object]:
        nonlocal nbytes
        if value.keys() == {"nbytes", "digest"} and isinstance(value["nbytes"], int):
            nbytes += value["nbytes"]
        return value

    try:
        json.loads(payload, object_hook=add)
    except (ValueError, RecursionError):
        return None
    return nbytes


def _format(kind: str) -> str:
    return f"lightning-moe-ckpt/{kind}"


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _sealed(payload: bytes) -> bytes:
    return b'{"digest":"%s","document":%s}\n' % (digest_of(payload).encode("ascii"), payload)


class Fields:
    """Typed reader of one JSON object: a missing, foreign or left-over key is `Corrupt`, never a default."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise Corrupt(f"{where}: an object was expected, found {type(value).__name__}.")
        self._left = dict(value)
        self._where = where

    def has(self, name: str) -> bool:
        """Whether the key is there and was not taken yet."""
        return name in self._left

    def integer(self, name: str) -> int:
        """Take a whole number of zero or more."""
        return read_integer(self._take(name, int), f"{self._where}: {name}")

    def text(self, name: str) -> str:
        """Take a string."""
        return self._take(name, str)

    def flag(self, name: str) -> bool:
        """Take true or false."""
        return self._take(name, bool)

    def mapping(self, name: str) -> Fields:
        """Take an object, wrapped in its own `Fields`."""
        return Fields(self._take(name, dict), f"{self._where}: {name}")

    def plain(self, name: str) -> dict[str, object]:
        """Take an object as a plain `dict`."""
        return self._take(name, dict)

    def rows(self, name: str, read: Callable[[object, str], T]) -> tuple[T, ...]:
        """Take a list; `read(element, where)` converts each element."""
        where = f"{self._where}: {name}"
        return tuple(read(value, where) for value in self._take(name, list))

    def optional(self, name: str, read: Callable[[object, str], T]) -> T | None:
        """Take `null`, or a value that `read(value, where)` converts."""
        value = self._take(name, object)
        return None if value is None else read(value, f"{self._where}: {name}")

    def end(self) -> None:
        """Raise `Corrupt` if a key was not taken."""
        if self._left:
            raise Corrupt(f"{self._where}: unknown keys {sorted(self._left)}.")

    def _take(self, name: str, kind: type[T]) -> T:
        value = self._left.pop(name, _MISSING)
        if value is _MISSING or not isinstance(value, kind):
            found = "nothing" if value is _MISSING else type(value).__name__
            raise Corrupt(f"{self._where}: {name!r} must be {kind.__name__}, found {found}.")
        return value


_MISSING = object()


def read_text(value: object, where: str) -> str:
    """Check a string inside a list."""
    if not isinstance(value, str):
        raise Corrupt(f"{where}: a string was expected, found {type(value).__name__}.")
    return value


def read_integer(value: object, where: str) -> int:
    """Check a whole number of zero or more inside a list."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_INTEGER:
        raise Corrupt(f"{where}: a whole number of zero or more, in 64 bits, was expected, found {value!r:.40}.")
    return value
