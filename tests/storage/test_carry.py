"""What a generation that lacks operators references: each one's newest stored state, from files and not from chains."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from door import StoredMarker
from hypothesis import given, settings
from hypothesis import strategies as st
from stored._damage import require_damage_is_seen
from stored._lives import named

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage import (
    Commit,
    GenerationId,
    RankMarker,
    RecordEntry,
    SegmentEntry,
    carry_forward,
    digest_of,
    full_records,
    segment_key,
)

EXPERTS = [f"blocks.{layer}.moe/expert.{i}" for layer in range(2) for i in range(3)]


def generation(step: int) -> GenerationId:
    return named(step=step, incarnation=1)


def record(operator: str, step: int, rank: int, kind: str = "full") -> RecordEntry:
    """The digest says of which step it is."""
    return RecordEntry(
        name=f"{kind}/{operator}", operator=operator, kind=kind, fqn=operator, state_key="param", dtype="F32",
        global_shape=(8,), global_start=4 * rank, numel=4, offset=4096, nbytes=16, digest=f"{operator}@{step}",
    )  # fmt: skip


def marker(step: int, experts: list[str], previous: RankMarker | None = None, rank: int = 0) -> RankMarker:
    """The dense part, a buffer, a journal and some experts; the others are in `previous`."""
    records = [record(name, step, rank) for name in ("dense", *experts)]
    records += [record("", step, rank, kind="journal"), record("", step, rank, kind="buffer")]
    own = SegmentEntry(
        step=step, key=segment_key(generation(step), rank, step), nbytes=9000, digest=f"{step:032d}", records=records
    )
    lacking = set(EXPERTS) - set(experts)
    return RankMarker(
        run_id="r", rank=rank, world_size=2, generation=generation(step), plan_hash="p", segments=(own,),
        referenced=() if previous is None else carry_forward(previous, lacking),
    )  # fmt: skip


def stored(found: RankMarker) -> StoredMarker:
    return StoredMarker(found, digest_of(found.to_bytes()))


selections = st.lists(st.lists(st.sampled_from(EXPERTS), unique=True), min_size=1, max_size=12)


@settings(max_examples=150)
@given(selections)
def test_every_operator_comes_once_and_from_its_newest_generation(chosen: list[list[str]]) -> None:
    """After any selections: against a dict of when each expert was last stored."""
    newest = dict.fromkeys(EXPERTS, 0)
    current = marker(0, EXPERTS)
    for step, experts in enumerate(chosen, 1):
        current = marker(step, experts, current)
        newest |= dict.fromkeys(experts, step)
        found = {r.operator: (r.digest, file.key) for file, r in full_records(current)}
        wanted = {**newest, "dense": step}
        assert found == {name: (f"{name}@{at}", segment_key(generation(at), 0, at)) for name, at in wanted.items()}
        assert Counter(r.operator for _, r in full_records(current)).most_common(1)[0][1] == 1
        assert current.needs == tuple(generation(at) for at in sorted({*newest.values()} - {step}))
        assert RankMarker.from_bytes(current.to_bytes(), "here") == current


def test_only_operators_that_the_new_generation_lacks_are_borrowed() -> None:
    """Also where another rank writes what this one wrote before: by operator, not by record."""
    dense = marker(0, EXPERTS)
    assert [r.operator for each in carry_forward(dense, EXPERTS[2:]) for r in each.segment.records] == EXPERTS[2:]
    assert carry_forward(dense, []) == carry_forward(dense, ["of another rank"]) == ()
    kinds = {r.kind for each in carry_forward(dense, ["", *EXPERTS]) for r in each.segment.records}
    assert kinds == {"full"}


def test_a_window_cannot_be_borrowed_from() -> None:
    """Its states are of several steps, and only replay makes them one."""
    first = marker(4, EXPERTS)
    window = dataclasses.replace(first, segments=(*first.segments, dataclasses.replace(first.segments[0], step=5)))
    with pytest.raises(ValueError, match="a window of 2 steps"):
        carry_forward(window, EXPERTS)


def test_a_commit_needs_what_any_rank_needs() -> None:
    """The union, in order; ranks may refer to different generations."""
    dense = [marker(0, EXPERTS, rank=rank) for rank in (0, 1)]
    second = marker(1, EXPERTS[:1], dense[0])
    markers = [marker(2, EXPERTS[1:], second), dataclasses.replace(marker(2, EXPERTS[:1], dense[1], rank=1))]
    commit = Commit.of([stored(each) for each in markers])
    assert commit.needs == (generation(0), generation(1))
    assert Commit.from_bytes(commit.to_bytes(), "here") == commit


def test_a_marker_may_only_borrow_older_files_of_its_own_rank() -> None:
    """Not another rank's, not its own or newer ones, none twice, and no side files."""
    good = marker(3, [], marker(2, EXPERTS[:2], marker(1, EXPERTS)))
    first, second = good.referenced
    future = named(step=1, incarnation=2)
    spoilt = [
        (dataclasses.replace(first, segment=dataclasses.replace(first.segment, key=segment_key(generation(1), 1, 1))),),
        (
            dataclasses.replace(
                first, generation=future, segment=dataclasses.replace(first.segment, key=segment_key(future, 0, 1))
            ),
        ),
        (second, first),
        (first, first),
        (dataclasses.replace(first, generation=generation(2)),),
    ]
    assert RankMarker.from_bytes(good.to_bytes(), "here") == good
    for referenced in spoilt:
        with pytest.raises(Corrupt, match="references"):
            RankMarker.from_bytes(dataclasses.replace(good, referenced=referenced).to_bytes(), "here")


def test_every_flipped_bit_and_every_truncation_of_a_marker_that_borrows_is_seen() -> None:
    """All bytes and all lengths, lines of referenced records included; also of its manifest."""
    alone = dataclasses.replace(marker(1, EXPERTS[:5], marker(0, EXPERTS)), world_size=1)
    for document in (alone, Commit.of([stored(alone)])):
        require_damage_is_seen(document)
