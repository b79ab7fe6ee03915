r"""Canonical JSON documents that carry the digest of their own bytes, and the forms of their contents.

```text
{"digest":"<32 hex digits>","document":{"body":{...},"format":"lightning-moe-ckpt/<kind>","version":7}}\n
```

The digest covers the bytes of the value of `document`. Keys are sorted, no blanks, ASCII only, no NaN: one value has
one spelling. The reader encodes the parsed value and compares the bytes, so it also sees damage that JSON tolerates (a
letter's case in an escape, a blank, a repeated key).

A `Form` describes a value once, for the writer and for the reader: every key with the form of its value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import xxhash

from lightning_moe_ckpt.errors import Corrupt, StorageRefused
from lightning_moe_ckpt.storage._names import MAX_DOCUMENT_NBYTES

DIGEST_NAME = "xxh3-128"
"""Name of the digest in documents. It detects accidents (flips, truncation, mix-ups), not attackers.

xxhash releases the GIL and runs at memory speed, so a background thread may digest a segment while training goes on.
Measured: 10 GB/s on one core; crc32 3, sha256 0.4."""


class OtherVersion(Corrupt):
    """The document is whole, but in another version of the format."""


def digest_of(*views: bytes | memoryview) -> str:
    """Return the digest, 32 lower-case hexadecimal digits, of C-contiguous bytes that follow each other, without copying them.

    The caller must not write to them meanwhile.
    """
    if len(views) == 1:
        return str(xxhash.xxh3_128_hexdigest(views[0]))
    digest = xxhash.xxh3_128()
    for view in views:
        digest.update(view)
    return str(digest.hexdigest())


VERSION = 7
"""Version of every document; no other version is read."""

T = TypeVar("T")

MAX_INTEGER = 2**63 - 1
"""Largest number in a document."""
_HEAD_NBYTES = len('{"digest":"') + 32 + len('","document":')


@dataclass(frozen=True, slots=True)
class Form(Generic[T]):
    """Form of a value, to be written as JSON and read back strictly: a missing value is never a default."""

    read: Callable[[object, str], T]
    """Takes the parsed value and its place, for messages. Raises `Corrupt`."""
    body: Callable[[T], object]
    """Returns the JSON value."""


class _Nothing:
    """Placeholder for the value of a missing key."""


def _name_of(value: object) -> str:
    return "nothing" if value is _Nothing else type(value).__name__


def _plain(kind: type[T]) -> Form[T]:
    return Form(lambda value, where: _expect(kind, value, where), lambda value: value)


def _expect(kind: type[T], value: object, where: str) -> T:
    if not isinstance(value, kind):
        raise Corrupt(f"{where} must be {kind.__name__}, found {_name_of(value)}.")
    return value


def _read_integer(value: object, where: str) -> int:
    number = _expect(int, value, where)
    if isinstance(value, bool) or not 0 <= number <= MAX_INTEGER:
        raise Corrupt(f"{where}: a whole number of zero or more, in 64 bits, was expected, found {value!r:.40}.")
    return number


TEXT, FLAG = _plain(str), _plain(bool)
OBJECT: Form[dict[str, Any]] = _plain(dict)
INTEGER: Form[int] = Form(_read_integer, lambda value: value)


def many(form: Form[T]) -> Form[tuple[T, ...]]:
    return Form(
        lambda value, where: tuple(form.read(each, where) for each in _expect(list, value, where)),
        lambda values: [form.body(each) for each in values],
    )


def maybe(form: Form[T]) -> Form[T | None]:
    """Return the form of a value that may be `null`."""
    return Form(
        lambda value, where: None if value is None else form.read(value, where),
        lambda value: None if value is None else form.body(value),
    )


def keys(make: Callable[..., T], fixed: Mapping[str, object] = MappingProxyType({}), /, **forms: Form[Any]) -> Form[T]:
    """Return the form of an object with exactly these keys, in the order in which they are read, and the `fixed` ones,
    each with its only value. `make` makes the value from the keys' values; its attributes of the same names are
    written.
    """

    def read(value: object, where: str) -> T:
        if not isinstance(value, dict):
            raise Corrupt(f"{where}: an object was expected, found {_name_of(value)}.")
        for name, only in fixed.items():
            if (found := value.get(name)) != only:
                raise Corrupt(
                    f"{where}: {name!r} is {found!r:.200}, this release reads {only!r}. "
                    "Read it with the release that wrote it."
                )
        made = {name: form.read(value.get(name, _Nothing), f"{where}: {name!r}") for name, form in forms.items()}
        if unknown := value.keys() - forms.keys() - fixed.keys():
            raise Corrupt(f"{where}: unknown keys {sorted(unknown)}.")
        return make(**made)

    return Form(read, lambda value: {**fixed, **{n: form.body(getattr(value, n)) for n, form in forms.items()}})


_DOCUMENT: Form[dict[str, Any]] = keys(dict, body=OBJECT, format=TEXT, version=INTEGER)


def encode(kind: str, body: object) -> bytes:
    """Encode a document of a kind such as `log`, `marker` or `commit`. Raises `ValueError` if a number is not finite,
    `TypeError` for a value without JSON form, `StorageRefused` if the document would be too large to be read back.
    """
    payload = _canonical({"body": body, "format": _format(kind), "version": VERSION})
    if len(payload) > MAX_DOCUMENT_NBYTES - 2**10:
        raise StorageRefused(
            f"a {kind} would have {len(payload)} bytes; {MAX_DOCUMENT_NBYTES} are read back. Keep fewer generations, or plan for "
            "fewer operators."
        )
    return _sealed(payload)


def decode(data: bytes, form: Form[T], *, kind: str, where: str) -> T:
    """Decode and check a document with a body of this form; `where` names it in messages. Raises `Corrupt` if grammar, spelling, digest,
    kind or version is not as written by `encode`, or the body has another form.
    """
    if len(data) > MAX_DOCUMENT_NBYTES:
        raise Corrupt(f"{where}: {len(data)} bytes are more than a document has. Another copy may be good.")
    payload = data[_HEAD_NBYTES:-2]
    if not data.startswith(b'{"digest":"') or not payload:
        raise Corrupt(f"{where}: not a document of this format. Another copy may be good.")
    if _sealed(payload) != data:
        raise Corrupt(f"{where}: its bytes do not match the digest they carry. Another copy may be good.")
    try:
        parsed = json.loads(payload.decode("ascii"))
        again = _canonical(parsed)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{where}: not a document of this format ({error}). Another copy may be good.") from error
    if again != payload:
        raise Corrupt(f"{where}: is not spelled as this format is. Another copy may be good.")
    document = _DOCUMENT.read(parsed, where)
    found, wanted = (document["format"], document["version"]), (_format(kind), VERSION)
    if found != wanted:
        raise OtherVersion(f"{where}: is {found}, expected {wanted}. Read it with the release that wrote it.")
    return form.read(document["body"], where)


def described_nbytes(head: bytes) -> int | None:
    """Return a file's size from its leading document, with the lines named there; `None` without one."""
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
