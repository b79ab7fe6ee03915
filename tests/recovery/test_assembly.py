"""One assembly against a model that tries every copy of every record; and the index that says where copies are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_moe_ckpt.errors import KeyMissing
from lightning_moe_ckpt.recovery import Assembly, Replicas, Request, Version, Wanted, stored_index
from lightning_moe_ckpt.recovery._assembly import MAX_STREAMS, Exhausted, Place
from lightning_moe_ckpt.recovery._index import RecordIndex, neighbours, newest_whole
from lightning_moe_ckpt.recovery._inventory import Replica
from lightning_moe_ckpt.storage import (
    GenerationId,
    RankMarker,
    RecordEntry,
    ReferencedEntry,
    SegmentEntry,
    SegmentLayout,
    TensorSpec,
    digest_of,
)
from lightning_moe_ckpt.tiers import TierName

NAMES = "abcde"
SIZES = dict(zip(NAMES, (4096, 64, 10000, 1, 5000), strict=True))
SOURCES: tuple[TierName, ...] = ("host", "peer", "peer", "storage")


def version(step: int) -> Version:
    return Version(GenerationId(step=step, incarnation=1), "plan")


def copy_of(number: int, source: TierName, step: int = 1) -> Replica:
    return Replica(source, f"m{number}", "tier", (number,), version(step), 0)


COPIES = [copy_of(number, source) for number, source in enumerate(SOURCES)]


def content(name: str) -> bytes:
    return bytes([ord(name)]) * SIZES[name]


def file_of(
    names: str, key: str, step: int = 1, *, operator: str = "", kind: str = "full"
) -> tuple[SegmentEntry, bytes]:
    """Records one behind the other on multiples of 64, after a header."""
    data, records = bytes(4096), []
    for name in names:
        records.append(
            RecordEntry(
                name=name, operator=operator or name, kind=kind, fqn=name, state_key="param", dtype="U8",
                global_shape=(SIZES[name],), global_start=0, numel=SIZES[name], offset=len(data), nbytes=SIZES[name],
                digest=digest_of(content(name)),
            )
        )  # fmt: skip
        data += content(name) + bytes(-SIZES[name] % 64)
    return SegmentEntry(step=step, key=key, nbytes=len(data), digest=digest_of(data), records=records), data


class Bytes:
    """What every copy has of every file; reading is counted."""

    def __init__(self) -> None:
        self.files: dict[tuple[Replica, str], bytearray | None] = {}
        self.requests: list[Request] = []

    def read(self, request: Request, out: memoryview) -> None:
        self.requests.append(request)
        data = self.files[request.copy, request.entry.key]
        if data is None:
            raise KeyMissing(f"{request.entry.key}: not there.")
        out[:] = data[request.offset : request.offset + request.nbytes]


def assembly_of(
    index: RecordIndex, names: str, *, may_be_lost: bool = True, source: Version = COPIES[0].version
) -> tuple[Assembly, torch.Tensor, dict[str, int]]:
    """A buffer of these records, in this order."""
    records, start, starts = index.step(source, source.generation.step), 0, {}
    wanted = []
    for name in names:
        held = records[name]
        wanted.append(Wanted(name, start, held.record.nbytes, held.record.digest, held.places))
        starts[name], start = start, start + held.record.nbytes + -held.record.nbytes % 64
    buffer = torch.full((start,), 255, dtype=torch.uint8)
    return Assembly("it", buffer, wanted, may_be_lost=may_be_lost), buffer, starts


def require(buffer: torch.Tensor, starts: dict[str, int]) -> None:
    for name, start in starts.items():
        assert buffer[start : start + SIZES[name]].numpy().tobytes() == content(name)


states = st.lists(st.one_of(st.none(), st.sets(st.sampled_from(NAMES))), min_size=len(COPIES), max_size=len(COPIES))
"""Of every copy: nothing, if it cannot be read; else the records that are bad in it."""


@settings(deadline=None, max_examples=300)
@given(states, st.permutations(NAMES), st.lists(st.sets(st.sampled_from([0, 1])), min_size=4, max_size=4))
def test_every_state_of_the_copies_gives_what_trying_each_gives(
    damage: list[set[str] | None], order: list[str], held: list[set[int]]
) -> None:
    """Two files of one step, of which replicas may hold one, both or none: what is good somewhere is brought, and nothing else."""
    files = [file_of("abc", "durable"), file_of("de", "node")]
    index, store = RecordIndex(), Bytes()
    for number, (entry, data) in enumerate(files):
        has = [copy for copy, numbers in zip(COPIES, held, strict=True) if number in numbers]
        index.add(version(1), entry, has)
        for copy, bad in zip(COPIES, damage, strict=True):
            spoilt = bytearray(data)
            for record in entry.records:
                spoilt[record.offset] ^= record.name in (bad or ())
            store.files[copy, entry.key] = None if bad is None else spoilt
    file_number = {name: number for number, (entry, _) in enumerate(files) for name in (r.name for r in entry.records)}

    def somewhere(name: str) -> bool:
        return any(
            bad is not None and name not in bad and file_number[name] in numbers
            for bad, numbers in zip(damage, held, strict=True)
        )

    assembly, buffer, starts = assembly_of(index, "".join(order))
    assert assembly.fill(store.read) == all(map(somewhere, NAMES))
    if not assembly.lost:
        require(buffer, starts)
        assert not assembly.unverified
        assert sum(assembly.supplied.values()) == sum(request.nbytes for request in store.requests)
    else:
        name = assembly.lost.removeprefix("it: ")[0]
        assert not somewhere(name)


LAYOUT = SegmentLayout([TensorSpec(name, torch.uint8, (SIZES[name],)) for name in NAMES], metadata={})


@settings(deadline=None, max_examples=300)
@given(st.lists(st.one_of(st.none(), st.sets(st.sampled_from(NAMES))), min_size=len(COPIES), max_size=len(COPIES)))
def test_records_that_are_verified_together_come_as_one_by_one(damage: list[set[str] | None]) -> None:
    """All of a file at once: what is bad is asked of the other copies alone, and what is good somewhere is brought."""
    (entry, data), store = file_of(NAMES, "file"), Bytes()
    for copy, bad in zip(COPIES, damage, strict=True):
        spoilt = bytearray(data)
        for record in entry.records:
            spoilt[record.offset] ^= record.name in (bad or ())
        store.files[copy, "file"] = None if bad is None else spoilt
    wanted = neighbours([entry], LAYOUT, COPIES)
    assert wanted is not None
    assert [list(each.names()) for each in wanted] == [list(NAMES)]
    buffer = torch.full((LAYOUT.nbytes,), 255, dtype=torch.uint8)
    assembly = Assembly("it", buffer, wanted, may_be_lost=True)
    good = all(any(bad is not None and name not in bad for bad in damage) for name in NAMES)
    assert assembly.fill(store.read) == good
    if good:
        require(buffer, {name: LAYOUT.span(name).offset for name in NAMES})
        if damage[0] is not None:  # else every record is asked of the others
            again = sum(SIZES[name] + 64 for name in damage[0])
            assert sum(request.nbytes for request in store.requests[1:]) <= len(COPIES) * again


def test_records_that_lie_otherwise_are_not_taken_for_neighbours() -> None:
    """A gap in the file ends a stretch, and another record is none of it."""
    entry, _ = file_of(NAMES, "file")
    moved = [replace(record, offset=record.offset + 4096 * (record.name > "b")) for record in entry.records]
    wanted = neighbours([replace(entry, records=moved)], LAYOUT, COPIES)
    assert wanted is not None
    assert [list(each.names()) for each in wanted] == [["a", "b"], ["c", "d", "e"]]
    assert [each.places[0].offset - each.start for each in wanted] == [0, 4096]
    for change in ({"name": "f"}, {"nbytes": 8, "dtype": "U8"}, {"dtype": "I8"}):
        other = [replace(entry.records[0], **change), *entry.records[1:]]
        assert neighbours([replace(entry, records=other)], LAYOUT, COPIES) is None
    assert neighbours([replace(entry, records=entry.records[:-1])], LAYOUT, COPIES) is None


def test_neighbours_are_one_read_of_the_whole_file() -> None:
    """From the cheapest copy there is."""
    index, store = RecordIndex(), Bytes()
    entry, data = file_of(NAMES, "file")
    index.add(version(1), entry, [COPIES[3], COPIES[0]])
    store.files = {(copy, "file"): bytearray(data) for copy in COPIES}
    assembly, buffer, starts = assembly_of(index, NAMES)
    assert assembly.fill(store.read)
    require(buffer, starts)
    (request,) = store.requests
    assert (request.copy, request.offset) == (COPIES[0], 4096)


@pytest.mark.parametrize("num_peers", [1, 2, 3, 9])
def test_a_run_is_striped_over_other_nodes(num_peers: int) -> None:
    """Each byte is asked of one of them, of about as many bytes each; never of more than a few at once."""
    index = RecordIndex()
    entry, _ = file_of(NAMES, "file")
    peers = [copy_of(number, "peer") for number in range(num_peers)]
    index.add(version(1), entry, [*peers, COPIES[3]])
    assembly, buffer, _ = assembly_of(index, NAMES)
    requests = sorted(assembly.requests(), key=lambda request: request.start)
    assert [request.start for request in requests] == [0, *(request.end for request in requests[:-1])]
    assert {request.offset - request.start for request in requests} == {4096}
    assert requests[-1].end == len(buffer) - (-SIZES[NAMES[-1]] % 64)
    assert len({request.copy for request in requests}) == len(requests) <= min(num_peers, MAX_STREAMS)
    assert len(requests) > 1 or num_peers == 1
    assert max(request.nbytes for request in requests) < len(buffer) / len(requests) + 4096


def test_a_stripe_accuses_nobody_before_one_copy_supplied_all_of_a_record() -> None:
    """The record that straddles two nodes is asked of one of them, whole, and is good there."""
    index, store = RecordIndex(), Bytes()
    entry, data = file_of("c", "file")
    peers = [copy_of(number, "peer") for number in range(2)]
    index.add(version(1), entry, peers)
    spoilt = bytearray(data)
    spoilt[4096 + SIZES["c"] - 1] ^= 1  # in the half that the second one is asked for
    store.files = {(peers[0], "file"): bytearray(data), (peers[1], "file"): spoilt}
    assembly, buffer, starts = assembly_of(index, "c")
    assert assembly.fill(store.read)
    require(buffer, starts)
    assert [request.copy for request in store.requests] == [*peers, peers[0]]
    assert not assembly.complaints


def test_what_must_not_be_lost_raises_where_it_was_tried() -> None:
    """With the place and the reason of each copy."""
    index, store = RecordIndex(), Bytes()
    entry, data = file_of("a", "file")
    index.add(version(1), entry, [COPIES[0], COPIES[3]])
    spoilt = bytearray(data)
    spoilt[4096] ^= 1
    store.files = {(COPIES[0], "file"): spoilt, (COPIES[3], "file"): None}
    assembly, _, _ = assembly_of(index, "a", may_be_lost=False)
    with pytest.raises(
        Exhausted, match=r"it: a is nowhere as it was written: host: file \(its digest differs\), storage: file"
    ):
        assembly.fill(store.read)


def test_nothing_wanted_is_done_at_once() -> None:
    """Nor does a record without bytes have to be read."""
    empty = Wanted("none", 0, 0, digest_of(b""), [])
    assert not Assembly("it", torch.empty(0, dtype=torch.uint8), [empty], may_be_lost=False).unverified


# -- the index


def places(replicas: Replicas) -> list[tuple[TierName, str]]:
    return [(place.copy.source, place.entry.key) for place in replicas.places]


def test_places_are_cheapest_first_whatever_is_added_first() -> None:
    """A record that several markers name has the places of all."""
    index, (entry, _) = RecordIndex(), file_of("a", "file")
    for copy in reversed(COPIES):
        index.add(version(1), entry, [copy])
    assert [source for source, _ in places(index.operator("a", version(1))["a"])] == list(SOURCES)


def test_of_what_contradicts_the_first_is_right() -> None:
    """Other bytes are no replica, and an operator that is cut otherwise adds nothing."""
    index, (entry, _) = RecordIndex(), file_of("a", "file")
    (record,) = entry.records
    index.add(version(1), entry, [COPIES[3]])
    rounded = replace(entry, key="rounded", records=[replace(record, digest=digest_of(b"other"))])
    index.add(version(1), rounded, [COPIES[1]])
    cut = replace(entry, key="cut", records=[replace(record, name="a/0+1"), replace(record, name="a/1+1")])
    index.add(version(1), cut, [COPIES[0]])
    assert {name: places(each) for name, each in index.operator("a", version(1)).items()} == {
        "a": [("storage", "file")]
    }


def test_an_operator_that_turned_out_bad_is_offered_no_more() -> None:
    """From there; an older generation still has it, and is the newest then."""
    index = RecordIndex()
    for step in (1, 2):
        index.add(version(step), file_of("ab", f"file{step}", step)[0], [copy_of(3, "storage", step)])
    sizes = {name: SIZES[name] for name in "ab"}

    def newest() -> tuple[dict[str, Version], list[str]]:
        return newest_whole({name: dict(row) for name, row in index.offered("ab").items()}, sizes)

    assert newest() == ({"a": version(2), "b": version(2)}, [])
    index.exclude("a", version(2))
    assert newest() == ({"a": version(1), "b": version(2)}, [])
    index.exclude("a", version(1))
    assert newest() == ({"b": version(2)}, ["a"])


def test_steps_of_a_window_are_apart() -> None:
    """Records of one name are another at each step, and only full states of the last one are the generation's."""
    index = RecordIndex()
    for step, kind in ((1, "full"), (2, "compute")):
        entry, _ = file_of("a", f"file{step}", step, kind=kind)
        index.add(version(2), entry, [copy_of(0, "host", 2)])
    assert [places(index.step(version(2), step)["a"]) for step in (1, 2)] == [[("host", "file1")], [("host", "file2")]]
    assert index.operator("a", version(2)) == {}


def test_what_storage_has_is_what_the_marker_names() -> None:
    """Its own file, what it references, and spares; or what of these is there."""
    (own, _), (old, _), (older, _) = (file_of("a", f"file{step}", step) for step in (3, 2, 1))
    referenced, spare = (ReferencedEntry(generation=version(e.step).generation, segment=e) for e in (old, older))
    marker = RankMarker(
        run_id="r", rank=0, world_size=1, generation=version(3).generation, plan_hash="plan", segments=(own,),
        referenced=(referenced,), spares=(spare,),
    )  # fmt: skip
    assert [each.generation.step for each, _ in stored_index(marker).offered("a")["a"]] == [3, 2, 1]
    assert [each.generation.step for each, _ in stored_index(marker, [spare]).offered("a")["a"]] == [3, 1]
    assert stored_index(marker).operators == ["a"]


def test_a_record_of_no_operator_is_found_by_name() -> None:
    """In whatever there is of a generation."""
    index, (entry, _) = RecordIndex(), file_of("a", "file", kind="journal")
    index.add(version(1), entry, [COPIES[0]])
    found = index.local(version(1).generation, "a")
    assert found is not None
    assert places(found) == [("host", "file")]
    assert index.local(version(2).generation, "a") is None
    assert Place(COPIES[0], entry, 4096) in index.step(version(1), 1)["a"].places
