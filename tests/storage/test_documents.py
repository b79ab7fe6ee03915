"""JSON documents: one value has one spelling, and any change of a byte is seen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from door import Cut, StoredMarker
from hypothesis import given, settings
from hypothesis import strategies as st
from stored._damage import require_damage_is_seen

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage import (
    Commit,
    GenerationId,
    HuggingFaceEntry,
    Lineage,
    ModuleEntry,
    ModuleLine,
    RankMarker,
    RecordEntry,
    ReferencedEntry,
    SegmentEntry,
    digest_of,
    segment_key,
)
from lightning_moe_ckpt.storage._entries import RecordTable
from lightning_moe_ckpt.storage._json import INTEGER, OBJECT, TEXT, VERSION, decode, described_nbytes, encode, keys

GENERATION = GenerationId(step=40, incarnation=3, nonce="c" * 12)


def _segment(rank: int, step: int) -> SegmentEntry:
    record = RecordEntry(
        name="blocks.0.moe/expert.3:w1:exp_avg", operator="blocks.0.moe/expert.3", kind="full", fqn="blocks.0.moe.w1",
        state_key="exp_avg", dtype="BF16", global_shape=(8, 2, 3), global_start=18, numel=6, offset=4096, nbytes=12,
        digest="0" * 32, present=False,
    )  # fmt: skip
    return SegmentEntry(
        step=step,
        key=segment_key(GENERATION, rank, step),
        nbytes=8192,
        digest="f" * 32,
        records=(record, dataclasses.replace(record, present=True, global_shape=(), global_start=0, numel=1, nbytes=2)),
    )


MODULE = ModuleEntry(
    class_name="Net",
    unsaved=("rope",),
    aliases={"head.weight": "embed.weight"},
    foreign=("_extra_state",),
    optimizer="AdamW",
    param_groups=(("embed.weight",), ()),
    hugging_face=(
        HuggingFaceEntry(prefix="hf", class_name="Tiny", config='{"a": NaN}', generation_config=None, tied=("head",)),
    ),
    extra="AA==",
)


def make_marker(rank: int = 0) -> RankMarker:
    return RankMarker(
        run_id="r",
        rank=rank,
        world_size=2,
        generation=GENERATION,
        plan_hash="p",
        segments=(_segment(rank, 39), _segment(rank, 40)),
        policy={"name": "sparse", "window": 2, "ratio": 0.1, "tags": ["a", "\u00e9"], "none": None},
        module=ModuleLine.of(MODULE) if rank == 0 else None,
    )


def _stored(marker: RankMarker) -> StoredMarker:
    return StoredMarker(marker, digest_of(marker.to_bytes()))


def _commit() -> Commit:
    return Commit.of([_stored(make_marker(0)), _stored(make_marker(1))])


def of_a_life(rank: int) -> RankMarker:
    """Rank 0 says what the incarnation descends from."""
    generation = dataclasses.replace(GENERATION, nonce="a" * 12)
    segments = [dataclasses.replace(_segment(rank, 40), key=segment_key(generation, rank, 40))]
    return dataclasses.replace(
        make_marker(rank), generation=generation, segments=tuple(segments), lineage=None if rank else LINEAGE
    )


LINEAGE = Lineage(
    opened_ns=10**18,
    first_incarnation=1,
    watermark=25,
    kept=frozenset(
        {GenerationId(step=20, incarnation=1, nonce="c" * 12), GenerationId(step=10, incarnation=2, nonce="b" * 12)}
    ),
    cuts=(Cut(2, None, "b" * 12), Cut(3, 30, "a" * 12)),
)


def _commit_of_a_life() -> Commit:
    return Commit.of([_stored(of_a_life(0)), _stored(of_a_life(1))])


def test_a_commit_repeats_what_rank_0_says_of_the_lineage() -> None:
    assert _commit_of_a_life().lineage == LINEAGE


@pytest.mark.parametrize(("life", "cuts"), [("b" * 12, LINEAGE.cuts), ("a" * 12, ())])
def test_a_lineage_ends_with_the_life_that_wrote_it(life: str, cuts: tuple[Cut, ...]) -> None:
    spoilt = dataclasses.replace(
        _commit_of_a_life(),
        generation=dataclasses.replace(GENERATION, nonce=life),
        lineage=dataclasses.replace(LINEAGE, cuts=cuts),
    )
    with pytest.raises(Corrupt, match="does not end with the incarnation"):
        Commit.from_bytes(spoilt.to_bytes(), "here")


@pytest.mark.parametrize(
    "document",
    [make_marker(), _commit(), of_a_life(0), of_a_life(1), _commit_of_a_life()],
    ids=["marker", "commit", "rank 0 of an incarnation", "rank 1 of an incarnation", "commit of an incarnation"],
)
def test_documents_come_back_equal(document: RankMarker | Commit) -> None:
    assert type(document).from_bytes(document.to_bytes(), "here") == document


@pytest.mark.parametrize("rank", [0, 1])
def test_the_document_of_a_marker_says_how_large_all_of_it_is(rank: int) -> None:
    """With or without a module, own files and older ones; cut short, or not a document, it says nothing."""
    older = ReferencedEntry(
        generation=dataclasses.replace(GENERATION, step=2),
        segment=dataclasses.replace(
            _segment(rank, 2), key=segment_key(dataclasses.replace(GENERATION, step=2), rank, 2)
        ),
    )
    data = dataclasses.replace(make_marker(rank), referenced=(older,), spares=(older,)).to_bytes()
    end = data.index(b"\n") + 1
    assert described_nbytes(data) == described_nbytes(data[:end]) == len(data) > end
    assert [described_nbytes(each) for each in (data[: end - 1], data[1:], b"", bytes(1000))] == [None] * 4


def test_a_commit_adds_the_markers_up() -> None:
    commit = _commit()
    assert (commit.steps, commit.world_size, commit.nbytes) == ((39, 40), 2, 2 * 2 * 8192)
    assert commit.markers[1] == digest_of(make_marker(1).to_bytes())


def test_ranks_that_disagree_make_no_commit() -> None:
    """A missing, swapped or repeated rank, and any fact that is not equal on all."""
    first, second = make_marker(0), make_marker(1)
    changes: list[dict[str, Any]] = [
        {"plan_hash": "q"}, {"run_id": "q"}, {"world_size": 3}, {"segments": second.segments[1:]}, {"policy": {}},
        {"generation": dataclasses.replace(GENERATION, incarnation=4)},
    ]  # fmt: skip
    others = [[first, dataclasses.replace(second, **change)] for change in changes]
    for markers in ([first], [second, first], [first, first], *others):
        with pytest.raises(Corrupt):
            Commit.of([_stored(marker) for marker in markers])


def test_a_marker_may_only_name_its_own_files() -> None:
    """A marker copied to another rank or generation would vouch for foreign bytes."""
    for foreign in (make_marker(1).segments, (dataclasses.replace(_segment(0, 40), step=39),)):
        spoilt = dataclasses.replace(make_marker(0), segments=foreign)
        with pytest.raises(Corrupt, match="not a file of"):
            RankMarker.from_bytes(spoilt.to_bytes(), "here")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[", "not JSON"),
        (b'{"digests":["d"],"rows":[]}', "1 digests for 0 records"),
        (b'{"digests":["d"],"rows":[["w"]]}', "a row of 12 columns"),
        (b'{"digests":[],"rows":[],"more":1}', "unknown keys"),
    ],
)
def test_a_commit_does_not_parse_records_and_a_reader_of_them_does(line: bytes, reason: str) -> None:
    """Records of a kind we do not know, under a good digest: the marker counts, whoever looks at them is told."""
    segment = dataclasses.replace(_segment(0, 39), records=RecordTable(line + b"\n"))
    marker = RankMarker.from_bytes(dataclasses.replace(make_marker(), segments=(segment,)).to_bytes(), "here")
    assert marker.steps == (39,)
    with pytest.raises(Corrupt, match=reason):
        list(marker.segments[0].records)


BOX = ((1, 0, 1), (4, 2, 2))


def _boxed(**fields: Any) -> SegmentEntry:
    """A record of 6 elements in a box of 16, beside one without a box."""
    segment = _segment(0, 40)
    first, second = segment.records
    boxed = dataclasses.replace(first, **{"box": BOX, "global_start": 10, **fields})
    return dataclasses.replace(segment, records=(boxed, second))


def test_records_of_boxes_come_back_equal_and_other_rows_are_as_they_were() -> None:
    """One value more in a row, in that row alone."""
    marker = dataclasses.replace(make_marker(), segments=(_boxed(),))
    data = marker.to_bytes()
    assert RankMarker.from_bytes(data, "here") == marker
    plain = dataclasses.replace(make_marker(), segments=(_boxed(box=None),)).to_bytes()
    lines, others = data.splitlines(), plain.splitlines()
    assert lines[1].replace(b",false,[[1,0,1],[4,2,2]]]", b",false]") == others[1]
    assert lines[2:] == others[2:]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"box": ((5, 0, 1), (4, 2, 2))}, "is of .4, 2, 2. elements from .5, 0, 1. on in a tensor of shape .8, 2, 3."),
        ({"box": ((1, 0), (4, 2))}, "in a tensor of shape"),
        ({"box": ((1, 0, 1), (4, 2))}, "in a tensor of shape"),
        ({"box": ((), ()), "global_shape": (), "global_start": 0, "numel": 1, "nbytes": 2}, "in a tensor of shape"),
        ({"global_start": 11}, "ends at element 17 of 16"),
        ({"box": ((1, 0, 1),)}, "box must be an offset and a size"),
        ({"box": ((1, 0, -1), (4, 2, 2))}, "box must be whole numbers"),
        ({"box": ((1, 0, True), (4, 2, 2))}, "box must be int, found bool"),
        ({"box": (1, 2)}, "box must be list, found int"),
        ({"box": "ab"}, "box must be list, found str"),
    ],
)
def test_boxes_that_cannot_be_are_refused(fields: dict[str, Any], reason: str) -> None:
    """Outside of the tensor, of other dimensions, smaller than the interval, or no box at all."""
    marker = RankMarker.from_bytes(dataclasses.replace(make_marker(), segments=(_boxed(**fields),)).to_bytes(), "here")
    with pytest.raises(Corrupt, match=reason):
        list(marker.segments[0].records)


def test_a_module_comes_back_equal() -> None:
    """Also texts that JSON itself would not hold, such as a configuration with NaN."""
    found = RankMarker.from_bytes(make_marker().to_bytes(), "here").module
    assert found is not None
    assert found.read() == MODULE


@pytest.mark.parametrize(
    ("line", "reason"),
    [(b"[", "not JSON"), (b"[]", "an object was expected"), (b'{"extra":1}', "'class_name' must be")],
)
def test_a_module_of_a_kind_we_do_not_know_is_told_to_who_asks(line: bytes, reason: str) -> None:
    """The marker counts: resuming does not need it."""
    marker = dataclasses.replace(make_marker(), module=ModuleLine(line + b"\n"))
    found = RankMarker.from_bytes(marker.to_bytes(), "here").module
    assert found is not None
    with pytest.raises(Corrupt, match=reason):
        found.read()


@pytest.mark.parametrize(
    "document", [make_marker(), _commit(), _commit_of_a_life()], ids=["marker", "commit", "commit of an incarnation"]
)
def test_every_flipped_bit_and_every_truncation_is_seen(document: RankMarker | Commit) -> None:
    require_damage_is_seen(document)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=3))
def test_any_json_object_comes_back_bit_for_bit(body: dict[str, object]) -> None:
    data = encode("log", {"it": body})
    found = decode(data, OBJECT, kind="log", where="here")["it"]
    assert found == body
    assert encode("log", {"it": found}) == data  # also tells 1 from 1.0 and 0.0 from -0.0


def test_what_json_cannot_say_is_refused_when_writing() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode("log", {"loss": float("nan")})
    with pytest.raises(TypeError):
        encode("log", {"bytes": b""})


def test_a_document_of_another_kind_or_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Corrupt, match="expected"):
        decode(encode("commit", {}), OBJECT, kind="marker", where="here")
    monkeypatch.setattr("lightning_moe_ckpt.storage._json.VERSION", VERSION + 1)
    newer = encode("marker", {})
    monkeypatch.undo()
    with pytest.raises(Corrupt, match="Read it with the release that wrote it"):
        decode(newer, OBJECT, kind="marker", where="here")


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"{}", b'{"document":null}', b"\xff\xfe", b"[" * 100_000, b'{"document":1e999}', b"9" * 5000],
)
def test_rubbish_is_corrupt_and_nothing_else(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode(data, OBJECT, kind="log", where="here")


@pytest.mark.parametrize("value", [True, -1, 1.0, "1", None, [1]])
def test_whole_numbers_are_nothing_else(value: object) -> None:
    with pytest.raises(Corrupt):
        decode(encode("log", {"n": value}), keys(dict, n=INTEGER), kind="log", where="here")


def test_unknown_and_missing_keys_are_refused() -> None:
    assert decode(encode("log", {"known": "x"}), keys(dict, known=TEXT), kind="log", where="here") == {"known": "x"}
    with pytest.raises(Corrupt, match="unknown keys"):
        decode(encode("log", {"known": "x", "unknown": 1}), keys(dict, known=TEXT), kind="log", where="here")
    with pytest.raises(Corrupt, match="found nothing"):
        decode(encode("log", {"known": "x"}), keys(dict, known=TEXT, missing=TEXT), kind="log", where="here")
