"""Constants: parameters that training does not change, stored once and named by every generation.

Files of constants are segments like any other. Their description is a document with a line of records per file, as in a
marker. Files and description are named by their digest, and lie under their incarnation: nobody else writes there, so
constants that no generation names can go as soon as the incarnation is over. Generations name the description in their
`policy`, under `CONSTANTS`; so do later incarnations' generations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_moe_ckpt.errors import Corrupt, KeyMissing
from lightning_moe_ckpt.storage._backend import Backend
from lightning_moe_ckpt.storage._catalog import Catalog, read_commit
from lightning_moe_ckpt.storage._entries import MarkerLines, SegmentEntry
from lightning_moe_ckpt.storage._json import Form, decode, digest_of, encode, keys, many
from lightning_moe_ckpt.storage._names import CONST_PREFIX, GenerationId, const_key, parse_const_key

CONSTANTS = "constants"
"""Key of the constants' description in a policy; absent without constants."""


class _Description(NamedTuple):
    files: tuple[SegmentEntry, ...]


def put_constants(backend: Backend, generation: GenerationId, files: Sequence[SegmentEntry]) -> str:
    """Store the description of durable files, and return its key."""
    data = constants_bytes(files)
    key = const_key(generation, digest_of(data), "done")
    backend.put(key, data)
    return key


def constants_bytes(files: Sequence[SegmentEntry]) -> bytes:
    """Return the description of constants' files."""
    lines = MarkerLines()
    document = encode(CONSTANTS, _form(lines).body(_Description(tuple(files))))
    return b"".join([document, *lines.written])


def constants_in(data: bytes, where: str) -> tuple[SegmentEntry, ...]:
    """Return the files described by `constants_bytes`. Raises `Corrupt`."""
    end = data.find(b"\n") + 1
    lines = MarkerLines(data, end)
    described = decode(data[:end], _form(lines), kind=CONSTANTS, where=where)
    lines.end(where)
    return described.files


def read_constants(backend: Backend, policy: Any) -> tuple[SegmentEntry, ...]:
    """Return a policy's files of constants, each with its records; none if the policy names none.

    Raises:
        Corrupt: the description is damaged.
        KeyMissing: the description is gone.
    """
    key = policy.get(CONSTANTS)
    if key is None:
        return ()
    place = parse_const_key(str(key))
    data = backend.get(key) if place is not None else b""
    if place is None or digest_of(data) != place[1]:
        raise Corrupt(f"{key}: does not describe the constants that the generation was taken with.")
    return constants_in(data, key)


def sweep_constants(backend: Backend, catalog: Catalog, *, incarnation: int) -> int:
    """Delete constants that no manifest names, and return their bytes.

    Args:
        backend: storage of the run.
        catalog: stored generations; if some manifest cannot be read, nothing is deleted.
        incarnation: oldest incarnation whose constants stay: they may be about to be named.
    """
    places = [(each, place) for each in backend.list(CONST_PREFIX) if (place := parse_const_key(each.key)) is not None]
    old = [each for each, place in places if place[0] < incarnation]
    if not old:
        return 0
    named: set[str] = set()
    try:
        for generation in (each for each, contents in catalog.items() if contents.committed):
            if CONSTANTS in (policy := read_commit(backend, generation).policy):
                named |= {str(policy[CONSTANTS]), *(constant.key for constant in read_constants(backend, policy))}
    except (Corrupt, KeyMissing):
        return 0
    doomed = [each for each in old if each.key not in named]
    for each in sorted(doomed, key=lambda each: (not each.key.endswith(".done"), each.key)):  # the description first
        backend.delete(each.key)
    return sum(each.nbytes for each in doomed)


def _form(lines: MarkerLines) -> Form[_Description]:
    return keys(_Description, files=many(lines.segment()))
