"""Test whether a place for checkpoints keeps the promises that the commit protocol needs.

Documentation of a store says what it should do; proxies, gateways and mount options decide what it does. All tests
run under `_doctor/` below the URL, through the same code that training writes with, and remove their objects.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from lightning_moe_ckpt._units import rate_text, size_text
from lightning_moe_ckpt.errors import CheckpointError, Corrupt, KeyExists, StorageError
from lightning_moe_ckpt.storage import Backend, ObjectBackend, PosixBackend, Retrying
from lightning_moe_ckpt.storage._backend import StorageOptions
from lightning_moe_ckpt.storage._object import UnfinishedUploads
from lightning_moe_ckpt.storage._open import open_without_retries

Observation = Literal["good", "weaker", "broken", "unknown"]
FencingVerdict = Literal["fenced", "unfenced", "unsafe"]

PREFIX = "_doctor/"
_PATIENCE = timedelta(seconds=5)
_STALE_SECONDS = 3600
_ROUNDS = 20
_RACES, _RACERS = 5, 16
_PAGE = 1100
"""Number of keys, more than any store lists at once."""
_PART_NBYTES = 5 * 2**20
_BIG_NBYTES = 2 * 16 * 2**20 + 7
"""Bytes of an object that is uploaded in three parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Result for one promise."""

    name: str
    state: Observation
    """`good`; `weaker`: works with less protection; `broken`: checkpoints there are not safe; `unknown`: cannot be found out from here."""
    found: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Conformance:
    """Results for one URL."""

    url: str
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> FencingVerdict:
        """`fenced`: safe whatever happens; `unfenced`: safe while only one job at a time runs; `unsafe`."""
        states = {check.state for check in self.checks}
        if "broken" in states:
            return "unsafe"
        creates = {check.name: check.state for check in self.checks}
        return "fenced" if creates[_CREATE] == creates[_RACE] == "good" else "unfenced"

    @property
    def meaning(self) -> str:
        """Meaning of the verdict, as text."""
        return _MEANINGS[self.verdict]


_CREATE, _RACE = "create-exclusive", "race of creators"
_SMALL_PARTS, _CHECKSUMS, _NESTED, _CLOCK = "small parts", "wrong checksums", "keys a and a/b", "clock"
_NOT_NEEDED = {_SMALL_PARTS, _CHECKSUMS, _NESTED, _CLOCK}
"""Checks of properties without use for checkpoints."""
_MEANINGS: dict[FencingVerdict, str] = {
    "fenced": "Fenced: checkpoints are safe here. A job that is started twice, or wakes up after its successor began, "
    "finds that out before it writes anything that counts.",
    "unfenced": "Unfenced: checkpoints are safe here as long as one job at a time uses this URL. Nothing half written is "
    "ever restored, and what an earlier start commits late is ignored. But two jobs started at the same moment would not "
    "notice each other and could delete each other's generations: let the scheduler see to it that there is one.",
    "unsafe": "Unsafe: do not keep checkpoints here. What is broken below would lose or mix up generations.",
}


def examine_url(
    url: str, *, storage_options: StorageOptions | None = None, progress: Callable[[str], None] = lambda _: None
) -> Conformance:
    """Run all checks under `url`, whose run is not changed; takes some seconds, or a minute if requests are slow. Raises
    `ConfigurationError` if the URL cannot be opened, `StorageError` if nothing can be written there.
    """
    raw = open_without_retries(url, storage_options=storage_options)
    with contextlib.closing(Retrying(raw, patience=_PATIENCE)) as backend:
        place = _Place(backend, raw, f"{PREFIX}{int(time.time())}-{uuid.uuid4().hex}/", url, storage_options)
        try:
            place.remove_stale()
            backend.put(f"{place.prefix}first", b"x")  # if this fails, every check would fail
            return Conformance(url=url, checks=tuple(_run(place, progress)))
        finally:
            place.clean_up()


@dataclass(frozen=True, slots=True)
class _Place:
    """Place for checks below the URL."""

    backend: Backend
    raw: Backend
    """Backend without retries."""
    prefix: str
    url: str
    storage_options: StorageOptions | None

    def key(self, name: str) -> str:
        return f"{self.prefix}{name}"

    def listed(self, name: str) -> list[str]:
        return [entry.key.removeprefix(self.prefix) for entry in self.backend.list(self.key(name))]

    def remove_stale(self) -> None:
        """Remove a killed examination's objects; a current examination's objects are younger."""
        keys = [entry.key for entry in self.backend.list(PREFIX)]
        began = {key: key.removeprefix(PREFIX).partition("-")[0] for key in keys}
        latest = time.time() - _STALE_SECONDS
        self._remove([key for key, second in began.items() if second.isdigit() and int(second) < latest])

    def clean_up(self) -> None:
        self.backend.sweep(self.prefix)
        self._remove([entry.key for entry in self.backend.list(self.prefix)])

    def _remove(self, keys: Sequence[str]) -> None:
        with ThreadPoolExecutor(_RACERS) as pool:
            list(pool.map(self.backend.delete, keys))


Tried = tuple[Observation, str]
_Try = Callable[[_Place], Tried]


def _run(place: _Place, progress: Callable[[str], None]) -> Iterator[Check]:
    for name, attempt in _CHECKS.items():
        progress(name)
        try:
            state, found = attempt(place)
        except CheckpointError as error:
            state, found = ("unknown" if name in _NOT_NEEDED else "broken"), f"failed: {error}"
        yield Check(name=name, state=state, found=found)


def _read_back(place: _Place) -> Tried:
    body = os.urandom(100_003)
    place.backend.put(place.key("whole"), body[:70_000], body[70_000:])
    if place.backend.get(place.key("whole")) != body:
        return "broken", "what is read is not what was written"
    place.backend.put(place.key("whole"), b"short")
    if place.backend.get(place.key("whole")) != b"short":
        return "broken", "an object that was replaced is read as it was before"
    return "good", "written, replaced, and read back at once"


def _big(place: _Place) -> Tried:
    body, out = memoryview(os.urandom(_BIG_NBYTES)), bytearray(_BIG_NBYTES)
    start = time.perf_counter()
    place.backend.put(place.key("big"), body)
    seconds = time.perf_counter() - start
    place.backend.get_into(place.key("big"), memoryview(out))
    if out != body:
        return "broken", "an object written in parts is read back with other bytes"
    return "good", f"{size_text(_BIG_NBYTES)} in parts, {rate_text(_BIG_NBYTES / seconds)}"


def _ranges(place: _Place) -> Tried:
    body = os.urandom(1_000_003)
    place.backend.put(place.key("ranges"), body)
    for start, nbytes in ((0, 1), (1, 999), (500_001, 500_002), (0, len(body))):
        out = bytearray(nbytes)
        place.backend.get_range(place.key("ranges"), start, memoryview(out))
        if out != body[start : start + nbytes]:
            return "broken", f"bytes {start} to {start + nbytes} are not those that were written there"
    with contextlib.suppress(Corrupt, StorageError):
        place.raw.get_range(place.key("ranges"), len(body) - 1, memoryview(bytearray(2)))
        return "broken", "a range beyond the end is filled with something"
    return "good", "parts of an object can be read"


def _listing(place: _Place) -> Tried:
    for turn in range(_ROUNDS):
        name = f"listing/{turn}"
        place.backend.put(place.key(name), b"x")
        if place.listed("listing/") != [name]:
            return "broken", f"after a put, round {turn}, the listing shows {place.listed('listing/')}"
        place.backend.delete(place.key(name))
        if left := place.listed("listing/"):
            return "broken", f"after a delete, round {turn}, the listing still shows {left}"
    place.backend.delete(place.key("listing/never"))
    return "good", f"shows every change at once, in {_ROUNDS} rounds"


def _pages(place: _Place) -> Tried:
    names = [f"pages/{number:05d}" for number in range(_PAGE)]
    with ThreadPoolExecutor(_RACERS) as pool:
        list(pool.map(lambda name: place.backend.put(place.key(name), b"x"), names))
    if (listed := place.listed("pages/")) != names:
        return "broken", f"of {_PAGE} keys a listing shows {len(set(listed))}, {len(listed)} lines"
    return "good", f"{_PAGE} keys are listed whole and in order"


def _create(place: _Place) -> Tried:
    if not place.raw.creates_exclusively:
        return "weaker", "a second create replaces the first: the store ignores the condition"
    place.backend.put(place.key("taken"), b"first")
    with contextlib.suppress(KeyExists):
        place.backend.create(place.key("taken"), b"second")
        return "broken", "refused over a created key, but not over one that was put"
    return "good", "an existing key is refused"


def _race(place: _Place) -> Tried:
    if not place.raw.creates_exclusively:
        return "weaker", "not tried: creates are not exclusive"
    with ThreadPoolExecutor(_RACERS) as pool:
        for turn in range(_RACES):
            key = place.key(f"race/{turn}")
            tries = pool.map(_creates, [place.raw] * _RACERS, [key] * _RACERS, range(_RACERS))
            won = [each for each in tries if each is not None]
            if len(won) > 1:
                return "broken", f"{len(won)} of {_RACERS} creators of one key were told that they made it"
            if won and place.backend.get(key) != won[0]:
                return "broken", "the key holds what another creator wrote than the one that was told so"
    return "good", f"{_RACES} times {_RACERS} at once, one winner each"


def _creates(backend: Backend, key: str, number: int) -> bytes | None:
    try:
        backend.create(key, b"%d" % number)
    except StorageError:  # refused, or without an answer
        return None
    return b"%d" % number


def _half_written(place: _Place) -> Tried:
    if not isinstance(place.raw, ObjectBackend | PosixBackend):
        return "unknown", "one call of the file system writes an object; what it shows meanwhile is not known"
    slow = open_without_retries(place.url, storage_options=place.storage_options, bandwidth=_PART_NBYTES)
    with ThreadPoolExecutor(1) as pool:
        try:
            writing = pool.submit(slow.put, place.key("half/a"), bytes(4 * _PART_NBYTES))
            shown = set()
            for _ in range(_ROUNDS):
                shown.update(place.listed("half/"))
            early = not writing.done()
        finally:
            slow.close()
        with contextlib.suppress(StorageError):
            writing.result()
            return "unknown", "the write ended before it could be interrupted"
    shown.update(place.listed("half/"))
    if shown:
        return "broken", f"half an object is listed: {sorted(shown)}"
    return "good", "an object under way is not seen" + (", and gone when its writer gives up" if early else "")


def _unfinished(place: _Place) -> Tried:
    raw = place.raw
    if isinstance(raw, PosixBackend):
        return "good", "temporary files are found and removed at the next start"
    if not isinstance(raw, ObjectBackend) or raw.unfinished is None:
        return "weaker", "uploads of killed processes cannot be listed: give the bucket a lifecycle rule"
    uploads, prefix = raw.unfinished, raw.full_key(place.prefix)
    uploads.list(prefix)  # finds out whether it can
    if uploads.why_useless is not None:
        return "weaker", f"uploads of killed processes stay ({uploads.why_useless}): give the bucket a lifecycle rule"
    upload = uploads.begin(raw.full_key(place.key("left")))
    if upload not in uploads.list(prefix):
        return "weaker", "an upload under way is not listed: give the bucket a lifecycle rule"
    place.backend.sweep(place.prefix)
    if uploads.list(prefix):
        return "weaker", "an aborted upload stays listed: give the bucket a lifecycle rule"
    return "good", "uploads of killed processes are found and aborted at the next start"


def _s3(place: _Place) -> tuple[UnfinishedUploads, ObjectBackend] | None:
    """Return the uploads of a store that lists them, as S3 does."""
    raw = place.raw
    if not isinstance(raw, ObjectBackend) or raw.unfinished is None or raw.unfinished.why_useless is not None:
        return None
    return raw.unfinished, raw


def _small_parts(place: _Place) -> Tried:
    if (found := _s3(place)) is None:
        return "unknown", "only S3 has such a rule"
    uploads, raw = found
    refused = uploads.refuses_small_parts(raw.full_key(place.key("small")))
    return "good", f"parts below 5 MiB are {'refused' if refused else 'taken'}; ours are larger"


def _checksums(place: _Place) -> Tried:
    if (found := _s3(place)) is None:
        return "unknown", "not asked of the store: digests of every byte are in our markers, and compared on reading"
    uploads, raw = found
    refused = uploads.refuses_wrong_digest(raw.full_key(place.key("digest")))
    said = "refuses a body with a wrong digest" if refused else "takes a body with a wrong digest"
    return "good", f"{said}; ours are in the markers, and compared on reading"


def _nested(place: _Place) -> Tried:
    place.backend.put(place.key("nested/a"), b"x")
    try:
        place.raw.put(place.key("nested/a/b"), b"y")
    except StorageError:
        return "good", "refused, as by file systems; no two keys of ours are such"
    if (place.backend.get(place.key("nested/a")), place.backend.get(place.key("nested/a/b"))) != (b"x", b"y"):
        return "broken", "one of the two is lost"
    if place.listed("nested/") != ["nested/a", "nested/a/b"]:
        return "weaker", "both are kept, and one of the two is not listed; no two keys of ours are such"
    return "good", "both are kept; no two keys of ours are such"


def _clock(place: _Place) -> Tried:
    before = time.time()
    place.backend.put(place.key("clock"), b"x")
    if not isinstance(place.raw, ObjectBackend | PosixBackend):
        return "unknown", "the store does not tell its time"
    ahead = place.raw.modified(place.key("clock")) - before
    said = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine; nothing here is decided by time"
    if abs(ahead) > 600 and isinstance(place.raw, ObjectBackend):
        return "weaker", said + ", but signatures are refused from 15 minutes on: set the clock"
    return "good", said


_CHECKS: dict[str, _Try] = {
    "read after write": _read_back,
    "large objects": _big,
    "ranges": _ranges,
    "listing": _listing,
    "more than 1000 keys": _pages,
    _CREATE: _create,
    _RACE: _race,
    "half-written objects": _half_written,
    "leftovers": _unfinished,
    _SMALL_PARTS: _small_parts,
    _CHECKSUMS: _checksums,
    _NESTED: _nested,
    _CLOCK: _clock,
}
